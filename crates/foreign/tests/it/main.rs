//! What images of each format do as a whole, in one program: linked once, and with its tests beside each
//! other.

#[path = "../cuts/mod.rs"]
mod cuts;

mod bochs;
mod cloop;
mod common;
mod corpus;
mod damage;
mod dmg;
mod full_disk;
mod parallels;
mod power_cuts;
mod qcow;
mod qcow_encrypted;
mod qed;
mod side_by_side;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;
