//! Changing the size of an image that is in use.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`change`] | another size, while requests run: growing, shrinking, new space made ahead |
//! | [`clear`] | giving up everything that an image holds itself |
//! | [`shrink`] | giving up what lies beyond the end: its mapping, its clusters |

pub(crate) mod change;
pub(crate) mod clear;
pub(crate) mod shrink;
