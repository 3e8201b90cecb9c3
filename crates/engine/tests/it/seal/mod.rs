//! Sealed images of every kind: sound ones verify, every flipped bit is named with its guest
//! range, and no reader that verifies gets a byte or a status that is not as it was sealed.

mod disk;
mod flips;
mod lifecycle;
mod power_cuts;
mod writers;
