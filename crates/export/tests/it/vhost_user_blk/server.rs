//! A server on a thread of its own.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use vellum::BlockDevice;
use vellum_export::nbd::Listener;
use vellum_export::vhost_user_blk::{Export, Options};
use vellum_io::lane::{LaneOptions, LaneThread};

/// An export that serves until this is dropped.
pub struct Server {
    lane: Option<LaneThread>,
    folder: tempfile::TempDir,
    lines: Arc<Mutex<Vec<String>>>,
}

std::thread_local! {
    static EXPORT: std::cell::RefCell<Option<std::rc::Rc<Export>>> = const { std::cell::RefCell::new(None) };
}

fn export() -> std::rc::Rc<Export> {
    EXPORT
        .with(|export| export.borrow().clone())
        .expect("an export")
}

impl Server {
    pub fn start(device: Arc<dyn BlockDevice>, options: Options) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let lane = LaneThread::start("server", LaneOptions::default()).expect("a lane");
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (path, heard) = (folder.path().join("socket"), lines.clone());
        lane.call(move || async move {
            let listener = Listener::bind_unix(&path)?;
            let log = Arc::new(move |line: &str| {
                heard.lock().expect("lines").push(line.to_owned());
            });
            let made = Export::start(device, &options, listener, Some(log))?;
            EXPORT.with(|export| export.replace(Some(std::rc::Rc::new(made))));
            Ok(())
        })
        .expect("an export");
        Server {
            lane: Some(lane),
            folder,
            lines,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// What was said of clients and guests.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("lines").clone()
    }

    fn lane(&self) -> &LaneThread {
        self.lane.as_ref().expect("a lane")
    }

    pub fn update_size(&self) {
        let update = || async {
            export().update_size().await;
            Ok(())
        };
        self.lane().call(update).expect("told");
    }

    pub fn connections(&self) -> usize {
        let ask = || async { Ok(export().connections()) };
        self.lane().call(ask).expect("asked")
    }

    /// Ends it.
    pub fn end(&mut self) {
        if let Some(lane) = self.lane.take() {
            let end = || async {
                export().end().await;
                EXPORT.with(|export| export.take());
                Ok(())
            };
            lane.call(end).expect("ended");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
