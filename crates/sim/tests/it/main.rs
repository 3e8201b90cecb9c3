//! What the simulators find, and what they are to find, in one program: linked once, and with its tests beside
//! each other. Tests that take mends out are programs of their own.

mod compact;
mod daemon;
mod daemon_sessions;
mod data_file;
mod disk_bugs;
mod engine;
mod foreign;
mod reach;
mod resume;
mod rules;
mod shared_blocks;
mod space;
mod toy;
mod write_log;
