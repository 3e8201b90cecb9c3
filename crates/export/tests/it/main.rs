//! Servers and their clients, in one program: linked once, and with its tests beside each other.

mod client;
mod common;
mod corpus;
mod hostile;
mod leaving;
mod sessions;
mod transmission;
mod vhost_user_blk;
mod vhost_user_blk_corpus;
