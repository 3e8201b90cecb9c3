//! [`Chardevs`]: all character devices, and what commands do with them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use serde_json::{Value, json};
use vellum_options::Options;

use crate::failure::{Failure, message};
use crate::qmp::{self, Arguments};
use crate::server::{Notice, ServerEnvironment};

use super::device::{Chardev, Open};
use super::ring::Ring;
use super::settings::{Backend, Settings};

/// What `chardev-add` is asked for.
pub(crate) struct Wanted {
    pub(super) id: String,
    /// Or what is wrong with it, apart from how it is written.
    pub(super) settings: Result<Settings, Failure>,
}

impl Wanted {
    /// Takes the arguments `id` and `backend`.
    ///
    /// # Errors
    /// In QEMU's words for what no schema allows.
    pub(crate) fn take(arguments: &mut Arguments) -> Result<Self, qmp::Failure> {
        let id = arguments.need_text("id")?;
        let settings = Settings::from_arguments(arguments)?;
        Ok(Wanted { id, settings })
    }
}

/// All character devices, by name.
#[derive(Debug, Default)]
pub(crate) struct Chardevs(RefCell<BTreeMap<String, Rc<Chardev>>>);

impl Chardevs {
    /// Adds one as a command line describes it.
    ///
    /// # Errors
    /// In QEMU's words.
    pub(crate) async fn add(
        &self,
        options: Options,
        environment: &ServerEnvironment,
        in_background: bool,
    ) -> Result<(), Failure> {
        let (id, settings) = Settings::from_options(options)?;
        if self.0.borrow().contains_key(&id) {
            return Err(message(format!(
                "attempt to add duplicate property '{id}' to object (type 'container')"
            )));
        }
        if settings.backend == Backend::Stdio {
            if in_background {
                return Err(message("cannot use stdio with -daemonize"));
            }
            self.check_stdio()?;
        }
        let chardev = Chardev::open(&id, settings, environment).await?;
        if let Some(path) = chardev.terminal() {
            (environment.tell)(Notice::Line(format!(
                "char device redirected to {path} (label {id})"
            )));
        }
        self.0.borrow_mut().insert(id, Rc::new(chardev));
        Ok(())
    }

    fn check_stdio(&self) -> Result<(), Failure> {
        match self.0.borrow().values().any(|one| one.is_stdio()) {
            true => Err(message("cannot use stdio by multiple character devices")),
            false => Ok(()),
        }
    }

    pub(super) fn get(&self, id: &str) -> Option<Rc<Chardev>> {
        self.0.borrow().get(id).cloned()
    }

    /// Gives one to a monitor.
    ///
    /// # Errors
    /// If there is none, or somebody else has it.
    pub(crate) fn take(&self, id: &str) -> Result<Rc<Chardev>, Failure> {
        let Some(chardev) = self.get(id) else {
            return Err(message(format!("chardev \"{id}\" not found")));
        };
        match chardev.in_use.replace(true) {
            true => Err(message(format!("chardev '{id}' is already in use"))),
            false => Ok(chardev),
        }
    }

    /// Forgets all of them: their sockets and links go.
    pub(crate) fn clear(&self) {
        self.0.take();
    }

    /// Their names, and the names of their types.
    pub(crate) fn kinds(&self) -> Vec<(String, String)> {
        let all = self.0.borrow();
        let typed = all.iter().map(|(id, chardev)| {
            let kind = match &chardev.backend {
                Open::One { kind, .. } => kind,
                Open::Pty(_) => "pty",
                Open::Socket(_) => "socket",
            };
            (id.clone(), format!("chardev-{kind}"))
        });
        typed.collect()
    }

    /// What `query-chardev` answers.
    pub(crate) fn query(&self) -> Value {
        let all = self.0.borrow();
        let one = |chardev: &Rc<Chardev>| {
            json!({
                "frontend-open": chardev.in_use.get(),
                "filename": chardev.filename(),
                "label": chardev.label,
            })
        };
        all.values().map(one).collect()
    }

    /// `chardev-add`.
    pub(crate) async fn add_new(
        &self,
        wanted: Wanted,
        environment: &ServerEnvironment,
    ) -> qmp::Outcome {
        let Wanted { id, settings } = wanted;
        let prefixed = |Failure(text): Failure| {
            qmp::Failure::new(format!("Failed to add chardev '{id}': {text}"))
        };
        let exists = || qmp::Failure::new(format!("Chardev with id '{id}' already exists"));
        if self.get(&id).is_some() {
            return Err(exists());
        }
        let settings = settings.map_err(prefixed)?;
        if settings.backend == Backend::Stdio {
            self.check_stdio().map_err(prefixed)?;
        }
        let opened = Chardev::open(&id, settings, environment).await;
        let chardev = opened.map_err(prefixed)?;
        // Opening may take its time.
        if self.get(&id).is_some() {
            return Err(exists());
        }
        let answer = match chardev.terminal() {
            Some(path) => json!({"pty": path}),
            None => json!({}),
        };
        self.0.borrow_mut().insert(id, Rc::new(chardev));
        Ok(answer)
    }

    /// `chardev-change`: takes out the one that is to be made anew.
    ///
    /// # Errors
    /// If there is none, or a monitor is at it.
    pub(crate) fn take_for_change(&self, wanted: &Wanted) -> Result<(), qmp::Failure> {
        let id = &wanted.id;
        match self.get(id) {
            None => Err(qmp::Failure::new(format!("Chardev '{id}' does not exist"))),
            Some(chardev) if chardev.in_use.get() => Err(qmp::Failure::new(
                "Chardev user does not support chardev hotswap",
            )),
            Some(_) => {
                self.0.borrow_mut().remove(id);
                Ok(())
            }
        }
    }

    /// `chardev-remove`.
    ///
    /// # Errors
    /// If there is none, or a monitor is at it.
    pub(crate) fn remove(&self, id: &str) -> Result<(), qmp::Failure> {
        match self.get(id) {
            None => Err(not_found(id)),
            Some(chardev) if chardev.in_use.get() => {
                Err(qmp::Failure::new(format!("Chardev '{id}' is busy")))
            }
            Some(_) => {
                self.0.borrow_mut().remove(id);
                Ok(())
            }
        }
    }

    /// Whether there is one.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn must_have(&self, id: &str) -> Result<(), qmp::Failure> {
        match self.get(id) {
            None => Err(not_found(id)),
            Some(_) => Ok(()),
        }
    }

    /// Does something with a buffer.
    ///
    /// # Errors
    /// If there is no device of this name, or it is no buffer.
    pub(crate) fn with_ring<T>(
        &self,
        id: &str,
        work: impl FnOnce(&Ring) -> T,
    ) -> Result<T, qmp::Failure> {
        let Some(chardev) = self.get(id) else {
            return Err(qmp::Failure::new(format!("Device '{id}' not found")));
        };
        match chardev.ring() {
            Some(ring) => Ok(work(ring)),
            None => Err(qmp::Failure::new(format!("{id} is not a ringbuf device"))),
        }
    }
}

fn not_found(id: &str) -> qmp::Failure {
    qmp::Failure::new(format!("Chardev '{id}' not found"))
}
