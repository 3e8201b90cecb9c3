//! Tests of images in one program: linked once, and with its tests beside each other.

mod audit_corpus;
mod extents;
