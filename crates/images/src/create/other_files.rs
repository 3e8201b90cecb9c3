//! What an image consists of beside the file that it is named by.

use vellum::Result;
use vellum_graph::foreign;
use vellum_options::create_options::CreateSettings;

use super::SECTOR_BYTES;

/// Names of the files that an image with these settings is made with, beside the one that is called
/// `name`: an external data file, extents. Where their size is not known yet, at least one.
///
/// # Errors
/// As making the image, for settings that it cannot have.
pub fn other_files(name: &str, format: &str, settings: &CreateSettings) -> Result<Vec<String>> {
    if let Some(data_file) = settings.text("data_file") {
        return Ok(vec![data_file.to_owned()]);
    }
    let Some(creation) = foreign::find(format).and_then(|format| format.create.as_ref()) else {
        return Ok(Vec::new());
    };
    let mut settings = settings.clone();
    if settings.integer("size").is_none() {
        settings.set("size", &SECTOR_BYTES.to_string())?;
    }
    (creation.extents)(&settings, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::settings;

    #[test]
    fn images_of_several_files_are_told() {
        for (format, options, count) in [
            ("qcow2", "", 0),
            ("qcow2", "data_file=there", 1),
            ("raw", "", 0),
            ("vdi", "static=on", 0),
            ("vmdk", "", 0),
            ("vmdk", "subformat=streamOptimized", 0),
            ("vmdk", "subformat=monolithicFlat", 1),
            ("vmdk", "subformat=twoGbMaxExtentSparse", 1),
            ("vmdk", "subformat=twoGbMaxExtentFlat,size=3G", 2),
        ] {
            let mut given = settings("disk", format).unwrap();
            given.parse(options).unwrap();
            let files = other_files("disk", format, &given).unwrap();
            assert_eq!(files.len(), count, "{format} {options}");
        }
    }
}
