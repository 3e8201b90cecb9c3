//! `blockdev-add`: nodes are opened beside everything else, or in the turn of whoever asks.

use vellum::Result;
use vellum_options::{OpenFlags, Options};

use crate::drivers;
use crate::live::new_node::NewNode;
use crate::live::nodes::Nodes;
use crate::node::errors::invalid;
use crate::node::file_policy::FilePolicy;
use crate::node::origin::Role;
use crate::node::place::{NodePlace, Turns};
use crate::open::context::OpenContext;
use crate::open::node::open_node;

impl Nodes {
    /// Opens a node and gives it the name that its `node-name` says. Takes a turn in the end.
    ///
    /// # Errors
    /// In QEMU's words, as far as it has some.
    pub async fn add(&self, options: Options) -> Result<()> {
        let new = self.open_new(options, Turns::Own).await?;
        let _turn = self.take_turn().await;
        new.show();
        Ok(())
    }

    /// Opens a node as [`Nodes::add`] does, which nobody finds before it is shown: beside all that is done
    /// with others, or in the turn of whoever asks.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_new(&self, options: Options, turns: Turns) -> Result<NewNode> {
        self.open_named(options, (turns, false)).await
    }

    /// As [`Nodes::open_new`], as a state file says that the node was when another process ended.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_restored(&self, options: Options) -> Result<NewNode> {
        self.open_named(options, (Turns::Own, true)).await
    }

    async fn open_named(&self, options: Options, how: (Turns, bool)) -> Result<NewNode> {
        let Some(driver) = options.get_text("driver").map(str::to_owned) else {
            return Err(invalid("Parameter 'driver' is missing"));
        };
        let Some(name) = options.get_text("node-name").map(str::to_owned) else {
            return Err(invalid("'node-name' must be specified for the root node"));
        };
        self.check_new_name(&name)?;
        drivers::all().find(&driver).map_err(|_| {
            invalid(format!(
                "Parameter 'driver' does not accept value '{driver}'"
            ))
        })?;
        self.open_root(&name, options, how).await
    }

    /// As [`Nodes::open_new`], a node that a command needs for itself. Without a name it is given one, and
    /// without a driver it is an image of a format that its content tells.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_unlisted(&self, mut options: Options, turns: Turns) -> Result<NewNode> {
        let name = match options.get_text("node-name").map(str::to_owned) {
            Some(name) => {
                self.check_new_name(&name)?;
                name
            }
            None => self.make_up_name(),
        };
        options.set_text("node-name", &*name);
        self.open_root(&name, options, (turns, false)).await
    }

    /// Opens a node under its name, beside everything else, or in the turn of whoever asks.
    async fn open_root(
        &self,
        name: &str,
        options: Options,
        (turns, restored): (Turns, bool),
    ) -> Result<NewNode> {
        let new = self.begin_opening(name, &options)?;
        let mut place = NodePlace::opening(name, turns);
        place.restored = restored;
        let flags = OpenFlags {
            writable: true,
            ..OpenFlags::default()
        };
        let around = OpenContext::among(self, place, flags, FilePolicy::Any);
        // It names itself, as does every node below it that wants to.
        match open_node(options, Role::Image, &around).await {
            Ok(_) => Ok(new),
            Err(error) => {
                // Nothing of it was ever used; the first failure is the one to tell.
                let _ = new.discard().await;
                Err(error)
            }
        }
    }
}
