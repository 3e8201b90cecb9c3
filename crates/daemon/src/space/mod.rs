//! `x-vellum-query-space`: where the space of a disk goes, and warnings before a file system is full.
//!
//! What is asked runs beside guests and commands: it holds nothing, lets others have their turn, and
//! ends after a while with what it has found. While guests write, no figure is of one moment.

mod fill;
mod query;
mod surveys;
mod watch;

pub(crate) use fill::{SpaceWatch, Warning};
pub(crate) use query::query;
pub(crate) use surveys::{LastSurveys, SpaceSurvey};
