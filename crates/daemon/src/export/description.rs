//! [`Description`]: an export as its options describe it.

use vellum_export::WhenFull;
use vellum_options::Options;

use crate::failure::{Failure, failure, message, need, refuse_rest};

use super::surroundings::Origin;
use super::{fuse, nbd, vhost_user_blk};

/// An export as the options describe it.
#[derive(Debug)]
pub(crate) struct Description {
    pub(super) id: String,
    pub(super) node: String,
    pub(super) writable: bool,
    pub(super) writethrough: bool,
    /// The node may be inactive.
    pub(super) allow_inactive: bool,
    pub(super) when_full: WhenFull,
    pub(super) origin: Origin,
    pub(super) kind: Wanted,
}

/// What of the options belongs to a type.
#[derive(Debug)]
pub(super) enum Wanted {
    Nbd(nbd::Wanted),
    Fuse(fuse::Wanted),
    VhostUserBlk(vhost_user_blk::Wanted),
}

impl Description {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    /// Takes the options apart; `iothreads` are those that exist.
    pub(crate) fn take(
        mut options: Options,
        origin: Origin,
        iothreads: &[String],
    ) -> Result<Self, Failure> {
        let kind = need(&mut options, "type")?;
        match kind.as_str() {
            "nbd" | "fuse" | "vhost-user-blk" => {}
            "vduse-blk" => {
                return Err(message(format!(
                    "Exports of type '{kind}' are not part of this version"
                )));
            }
            _ => {
                return Err(message(format!(
                    "Parameter 'type' does not accept value '{kind}'"
                )));
            }
        }
        let id = need(&mut options, "id")?;
        let node = need(&mut options, "node-name")?;
        let mut switch = |key: &str| {
            let value = options.take_bool(key).map_err(failure)?;
            Ok::<bool, Failure>(value.unwrap_or(false))
        };
        let (writable, writethrough) = (switch("writable")?, switch("writethrough")?);
        // Lanes are the export's own, whatever becomes of the node's.
        switch("fixed-iothread")?;
        let allow_inactive = switch("allow-inactive")?;
        let when_full = take_when_full(&mut options, writethrough)?;
        let kind = match kind.as_str() {
            "fuse" => Wanted::Fuse(fuse::Wanted::take(&mut options)?),
            "vhost-user-blk" => Wanted::VhostUserBlk(vhost_user_blk::Wanted::take(&mut options)?),
            _ => Wanted::Nbd(nbd::Wanted::take(&mut options, &node)?),
        };
        let iothread = options.take_text("iothread").map_err(failure)?;
        if let Some(iothread) = iothread
            && !iothreads.contains(&iothread)
        {
            return Err(message(format!("iothread \"{iothread}\" not found")));
        }
        refuse_rest(&options)?;
        Ok(Description {
            id,
            node,
            writable,
            writethrough,
            allow_inactive,
            when_full,
            origin,
            kind,
        })
    }
}

/// Takes `on-full`.
fn take_when_full(options: &mut Options, write_through: bool) -> Result<WhenFull, Failure> {
    let text = options.take_text("on-full").map_err(failure)?;
    match text.as_deref() {
        None | Some("fail") => Ok(WhenFull::Fail),
        Some("wait") => Ok(WhenFull::Wait { write_through }),
        Some(other) => Err(message(format!(
            "Parameter 'on-full' does not accept value '{other}'"
        ))),
    }
}
