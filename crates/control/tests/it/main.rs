//! Drivers, the daemon and what its clients say, in one program: linked once, and with its tests beside each other.

mod audit_corpus;
mod corpus;
mod monitor_corpus;
mod opened_anew;
mod probed_raw;
mod qmp_corpus;
mod router_corpus;
