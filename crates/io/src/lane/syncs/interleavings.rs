//! Syncs beside writes and each other: none is believed that another one has learned a loss
//! from, and what a flush may be left out for is durable.

use std::sync::Arc;

use super::*;
use crate::lane::descriptor::{Descriptor, RunningSync};
use crate::sync::{block_on, explore, join, thread};

/// A kernel that tells a loss once.
#[derive(Debug, Default)]
struct Kernel(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    written: u64,
    durable: u64,
    /// A page was dropped, and nobody knows yet.
    untold: bool,
    lost: bool,
}

impl Kernel {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock()
    }

    /// `Err` once after a loss.
    fn sync(&self) -> Result<(), Errno> {
        let mut pages = self.pages();
        if std::mem::take(&mut pages.untold) {
            return Err(5);
        }
        pages.durable = pages.written;
        Ok(())
    }
}

/// One flush, as a file asks for it.
fn flush(file: &Arc<Descriptor>, kernel: &Kernel) -> Result<(), ()> {
    let Some(changes) = file.syncs().changes_to_sync() else {
        return Ok(());
    };
    let running = RunningSync::begin(file);
    let synced = kernel.sync();
    if let Err(errno) = synced {
        file.syncs().failed(errno);
    }
    drop(running);
    synced.map_err(drop)?;
    block_on(file.accept_sync("flush", changes)).map_err(drop)
}

fn file() -> (Arc<Descriptor>, Arc<Kernel>) {
    let file = Arc::new(Descriptor::none("file".into()));
    (file, Arc::new(Kernel::default()))
}

#[test]
fn a_loss_that_is_told_to_one_is_believed_by_all() {
    explore(|| {
        let (file, kernel) = file();
        let mut pages = kernel.pages();
        (pages.written, pages.untold, pages.lost) = (1, true, true);
        drop(pages);
        file.syncs().changed();
        let threads = [(); 3].map(|()| {
            let (file, kernel) = (file.clone(), kernel.clone());
            thread::spawn(move || flush(&file, &kernel))
        });
        for thread in threads {
            assert_eq!(thread.join().expect("ends"), Err(()), "pages were lost");
        }
    });
}

#[test]
fn a_flush_that_says_so_has_made_durable_what_was_written_before() {
    explore(|| {
        let (file, kernel) = file();
        let threads = [(); 2].map(|()| {
            let (file, kernel) = (file.clone(), kernel.clone());
            thread::spawn(move || {
                let mine = {
                    let mut pages = kernel.pages();
                    pages.written += 1;
                    pages.written
                };
                file.syncs().changed();
                flush(&file, &kernel).expect("nothing was lost");
                assert!(kernel.pages().durable >= mine, "it was said to be durable");
            })
        });
        join(threads);
    });
}
