//! What the monitor can be asked, as `query-qmp-schema` tells it.
//!
//! The declarations stand in three files, a line or more each (lines that go on are indented):
//!
//! - `commands.txt`: `command NAME { member: type, ?optional: type } -> result`, or a type's name
//!   for the members. A command of the table `COMMANDS` has one; others are not told.
//! - `events.txt`: `event NAME { ... }`.
//! - `types.txt`: `object NAME { ... }`, with variants `object NAME { ... } by TAG { value: type }`;
//!   `enum NAME { value, value }`; `alternate NAME { type, type }`.
//! - `rest.txt`: types of what is told over HTTP only.
//!
//! `[type]` is a list, `!word` a feature (`!deprecated`). Types' names are for readers: as in QEMU,
//! numbers take their place, which mean nothing. Drivers that are not there are left out of
//! what names them.
//!
//! Invariant: what is told can be asked. A test compares every entry with the real daemon's.

pub(super) mod check;
mod openapi;
mod parse;
mod table;

pub(super) use openapi::{argument_types, arguments, components, of_type, result};
use table::values;
pub(crate) use table::{COMMANDS, TYPES, has_event, introspect};
