//! The HTML pages that `bench` and `inspect` write: checks of the target path, and the SVG
//! elements that both use. Their style is `templates/page.css`; each page is one file that loads
//! nothing else.

mod page;
pub mod svg;

pub use page::{check_target, write};
