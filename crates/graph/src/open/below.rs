//! Opens the backing file of an image.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_options::{DetectZeroes, OpenFlags, Options};

use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::open_node;

/// The flags for a backing file of an image opened with `flags`.
pub(crate) fn backing_flags(flags: &OpenFlags) -> OpenFlags {
    let unlocked_from = flags.unlocked_from.map(|depth| depth.saturating_sub(1));
    OpenFlags {
        force_share: flags.force_share || unlocked_from == Some(0),
        unlocked_from,
        writable: false,
        detect_zeroes: DetectZeroes::Off,
        no_share: false,
        resize: false,
        no_backing: false,
        for_check: false,
        copy_on_read: false,
        ..flags.clone()
    }
}

/// Opens what the image at a place stands on.
pub(crate) async fn open_below(
    options: Options,
    around: &OpenContext,
) -> Result<Arc<dyn BlockDevice>> {
    let place = &around.place;
    let nodes = &around.nodes;
    if around.names_all()
        && let Some(name) = options.get_text("node-name").map(str::to_owned)
    {
        Box::pin(open_node(options, Role::Image, around)).await?;
        return nodes.stand_on(place, &name, &around.flags);
    }
    let key = nodes.base_key(&options, &around.flags, place);
    if let Some(key) = &key {
        let _turn = around.take_turn().await;
        if let Some(shared) = nodes.shared(key, &around.flags, place) {
            return Ok(shared);
        }
    }
    let mut own = options.clone();
    let name = around.names_all().then(|| nodes.make_up_name());
    if let Some(name) = &name {
        own.set_text("node-name", &**name);
    }
    let node = Box::pin(open_node(own, Role::Image, around)).await?;
    let device = match &name {
        Some(name) => nodes.stand_on(place, name, &around.flags)?,
        None => node.into_device(&around.flags).await?,
    };
    // Unless another file has got the name meanwhile.
    if let Some(key) = key
        && nodes.base_key(&options, &around.flags, place).as_ref() == Some(&key)
    {
        nodes.share(place, key, (name, &device));
    }
    Ok(device)
}
