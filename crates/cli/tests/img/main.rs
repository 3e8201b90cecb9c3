//! The image tool beside the real `qemu-img`: the same command lines on twin
//! folders must print the same and end with the same code.

mod amend;
mod backing;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod encrypted_qcow;
mod foreign;
mod info;
mod luks;
mod map;
mod measure;
mod own;
mod rebase;
mod resize;
mod snapshot;
mod twins;
