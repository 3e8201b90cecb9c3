//! New images.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

use super::footer::{Footer, Kind, LEN_BYTES, MAX_SECTORS};
use super::geometry::Geometry;
use super::header::{BLOCK_BYTES, Header, TABLE_BYTES};
use super::image::FILE_TOO_BIG;
use crate::fields;
use crate::random_id::random_id;

/// Which kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Subformat {
    /// Blocks get their places when they are written.
    #[default]
    Dynamic,
    /// The bytes lie as they are, a footer behind them.
    Fixed,
}

impl Subformat {
    /// From QEMU's name for it.
    pub fn parse(name: &str) -> Option<Subformat> {
        match name {
            "dynamic" => Some(Subformat::Dynamic),
            "fixed" => Some(Subformat::Fixed),
            _ => None,
        }
    }
}

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CreateOptions {
        /// The virtual size in bytes; rounded up to what a geometry tells, unless `force_size` is set.
        pub size_bytes: u64,
        /// Which kind of image.
        pub subformat: Subformat,
        /// The size is as it is, and the geometry tells nothing; Virtual PC does not take such an image.
        pub force_size: bool,
        /// A size that a geometry does not tell is refused, not rounded.
        pub exact_size: bool,
    }
}

impl CreateOptions {
    /// The size that an image gets, in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`], in QEMU's words, for one that it cannot have.
    pub fn rounded_bytes(&self) -> Result<u64> {
        self.shape().map(|(size_bytes, _)| size_bytes)
    }

    fn shape(&self) -> Result<(u64, Geometry)> {
        let sectors = self.size_bytes.div_ceil(512);
        let geometry = match self.force_size {
            true => Geometry::LARGEST,
            false => Geometry::at_least(sectors),
        };
        let sectors = match geometry == Geometry::LARGEST {
            true if sectors > MAX_SECTORS => {
                let message = "The image size is too large for file format 'vpc'";
                let error = Error::new(ErrorKind::InvalidArgument, "create", message);
                return Err(error.with_errno(FILE_TOO_BIG));
            }
            true => sectors,
            false => geometry.total(),
        };
        let size_bytes = sectors * 512;
        if self.exact_size && size_bytes != self.size_bytes {
            let message = format!(
                "The requested image size cannot be represented in CHS geometry\n\
                 Try size={size_bytes} or force-size=on (the latter makes the image \
                 incompatible with Virtual PC)"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, "create", message));
        }
        Ok((size_bytes, geometry))
    }
}

/// Makes an image in an empty file.
///
/// # Errors
/// As [`CreateOptions::rounded_bytes`]; what the storage says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    let (size_bytes, geometry) = options.shape().map_err(|error| error.target(file.name()))?;
    let kind = match options.subformat {
        Subformat::Dynamic => Kind::Dynamic,
        Subformat::Fixed => Kind::Fixed,
    };
    let creator = if options.force_size { b"qem2" } else { b"qemu" };
    let footer = Footer::new(kind, creator, size_bytes, geometry, &random_id()?);
    match options.subformat {
        Subformat::Fixed => {
            file.truncate(size_bytes + LEN_BYTES as u64).await?;
            fields::write_at(&**file, size_bytes, footer.bytes()).await?;
        }
        Subformat::Dynamic => create_dynamic(file, size_bytes, &footer).await?,
    }
    file.flush().await
}

/// The footer comes last, at the beginning first: a file that has one at its end only would be a fixed image.
async fn create_dynamic(file: &Arc<dyn Storage>, size_bytes: u64, footer: &Footer) -> Result<()> {
    let entries = size_bytes.div_ceil(u64::from(BLOCK_BYTES));
    let table_len_bytes = (entries * 4).next_multiple_of(512);
    // At most 4 MiB.
    let table = vec![0xff; table_len_bytes as usize];
    let header = Header::encode(entries as u32);
    fields::write_at(&**file, LEN_BYTES as u64, &header).await?;
    fields::write_at(&**file, TABLE_BYTES, &table).await?;
    file.flush().await?;
    fields::write_at(&**file, 0, footer.bytes()).await?;
    file.flush().await?;
    fields::write_at(&**file, TABLE_BYTES + table_len_bytes, footer.bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_and_refused_as_qemu_does_it() {
        let options = CreateOptions::default();
        for (size_bytes, rounded_bytes) in [
            (0, 0),
            (1, 68 * 512),
            (100 << 20, 104_865_792),
            (10 << 20, 10_514_432),
            (200 << 30, 200 << 30),
        ] {
            let options = options.size_bytes(size_bytes);
            assert_eq!(options.rounded_bytes().unwrap(), rounded_bytes);
            let forced = options.force_size(true).rounded_bytes().unwrap();
            assert_eq!(forced, size_bytes.next_multiple_of(512));
        }
        let error = options.size_bytes(u64::MAX).rounded_bytes().unwrap_err();
        assert_eq!(
            error.message(),
            "The image size is too large for file format 'vpc'"
        );
        assert!(options.size_bytes(2040 << 30).rounded_bytes().is_ok());
        assert!(options.size_bytes(2041 << 30).rounded_bytes().is_err());
        let exact = options.size_bytes(100 << 20).exact_size(true);
        let error = exact.rounded_bytes().unwrap_err();
        assert!(error.message().contains("Try size=104865792 or"), "{error}");
    }
}
