//! Tests of the header codec.
