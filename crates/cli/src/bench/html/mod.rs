//! The page of `vellum bench --html`: one file with plots, nothing fetched, light and dark.
//!
//! `page` fills in the template; `chart` draws a plot, with the scale of `axis`, and `over_time` makes the one
//! whose axis is time.

mod axis;
mod chart;
mod over_time;
mod page;

pub(super) use page::write;
