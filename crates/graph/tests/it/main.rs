//! Drivers in one program: linked once, and with its tests beside each other.

mod corpus;
mod opened_anew;
mod probed_raw;
