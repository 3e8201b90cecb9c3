//! qcow2 images. Each kind of thought has one room; see docs/ARCHITECTURE.md.
