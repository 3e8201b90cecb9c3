//! The request itself: one write after the other, the header last.

use std::sync::Arc;

use super::encrypted;
use super::options::{CreateOptions, refuse};
use super::write;
use crate::{Result, Storage};

/// Makes a new image on `storage`, whatever it held; `data` is the external data
/// file, present exactly if `options` name one.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) before anything is written if the options are
/// not valid; otherwise what the storages say.
pub async fn create(
    storage: Arc<dyn Storage>,
    data: Option<Arc<dyn Storage>>,
    options: &CreateOptions,
) -> Result<()> {
    create_on(storage, data, options, Before::Emptied).await
}

/// As [`create`], on files that keep their length and, where the image has nothing, their content:
/// an external data file may hold the disk already, and not every file that can be made shorter
/// can grow again.
///
/// # Errors
/// As [`create`].
pub async fn create_over(
    storage: Arc<dyn Storage>,
    data: Option<Arc<dyn Storage>>,
    options: &CreateOptions,
) -> Result<()> {
    create_on(storage, data, options, Before::Kept).await
}

/// What becomes of that which the files hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Emptied,
    Kept,
}

async fn create_on(
    storage: Arc<dyn Storage>,
    data: Option<Arc<dyn Storage>>,
    options: &CreateOptions,
    before: Before,
) -> Result<()> {
    let mut layout = options.layout()?;
    if !storage.capabilities().growable {
        layout = layout.in_place_of(storage.len_bytes()?);
    }
    let luks = encrypted::new_volume(options).await?;
    let header = options.encoded_header(&layout, luks.as_ref())?;
    if data.is_some() != options.data_file.is_some() {
        return Err(refuse("An external data file must be both named and given"));
    }
    // The guest would see what lies in clusters that are preallocated.
    if before == Before::Emptied || !layout.data_range().is_empty() {
        write::empty(&storage, layout.file_size_bytes()).await?;
    }
    write::first_cluster(&storage, &header, &layout.geometry).await?;
    write::tables(&storage, &layout, options.encryption.is_some()).await?;
    write::lengthen(&storage, layout.file_size_bytes()).await?;
    if let Some(luks) = &luks {
        encrypted::write(&storage, &layout, luks).await?;
    }
    match &data {
        Some(data) => {
            if before == Before::Emptied {
                write::empty(data, layout.guest_size_bytes).await?;
            }
            let kept_bytes = match before {
                Before::Emptied => 0,
                Before::Kept => data.len_bytes()?.min(layout.guest_size_bytes),
            };
            write::lengthen(data, layout.guest_size_bytes).await?;
            let new = kept_bytes..layout.guest_size_bytes;
            write::space(data, new, options.preallocation).await?;
            data.flush().await?;
        }
        None => {
            write::space(&storage, layout.data_range(), options.preallocation).await?;
            encrypted::fill(&storage, &layout, options, luks.as_ref()).await?;
        }
    }
    storage.flush().await?;
    write::first_sector(&storage, &header).await?;
    storage.flush().await
}
