//! The daemon and what its clients say, in one program: linked once, and with its tests beside each other.

mod monitor_corpus;
mod qmp_corpus;
mod router_corpus;
