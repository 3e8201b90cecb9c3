//! Telling who listens under the image file, such as a debugger, what is about to happen, under
//! the names that QEMU's `blkdebug` gives these moments.
//!
//! Nobody listens in ordinary use: then a call costs one look at whether somebody
//! does. Who listens may hold the caller, so no lock of `std` is held here.

use std::sync::Arc;

use vellum_storage::{Event, Storage};

/// Tells who listens on `file`, if somebody does, of an event, and waits as long as that holds us.
/// Who has the image asks `Image::emit`.
#[inline]
pub(crate) async fn emit(file: &Arc<dyn Storage>, event: Event) {
    if let Some(listener) = file.event_listener() {
        listener.emit(event).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use parking_lot::Mutex;
    use vellum_io::lane::{block_on, yield_now};
    use vellum_io::{Buffer, spawn};
    use vellum_storage::event::Suspension;
    use vellum_storage::nodes::debug::HasDebugger;
    use vellum_storage::{EventListener, MemStorage, delegate};

    use super::*;
    use crate::gate::DenyAll;
    use crate::qcow2::create::{CreateOptions, create};
    use crate::qcow2::{OpenOptions, Qcow2};
    use crate::{BlockDevice, RequestFlags};

    /// A listener of an embedder's, which is no debugger.
    #[derive(Debug, Default)]
    struct Ears {
        heard: Mutex<Vec<Event>>,
        /// Ends the hold on those who told of a write.
        go_on: event_listener::Event,
    }

    impl EventListener for Ears {
        fn event(&self, event: Event) -> Option<Suspension> {
            self.heard.lock().push(event);
            (event == Event::WriteAio).then(|| Suspension::until(self.go_on.listen()))
        }
    }

    #[derive(Debug)]
    struct Heard(MemStorage, Arc<Ears>);

    impl Storage for Heard {
        delegate!(0: name, len_bytes, read, write, write_zeroes, flush, truncate, capabilities);

        fn event_listener(&self) -> Option<Arc<dyn EventListener>> {
            Some(self.1.clone())
        }
    }

    #[test]
    fn any_listener_is_told_and_may_hold_requests() {
        block_on(async {
            let ears = Arc::<Ears>::default();
            let file = Arc::new(Heard(MemStorage::new(), ears.clone()));
            assert!(file.debugger().is_none());
            let options = CreateOptions::default().size_bytes(1 << 20);
            create(file.clone(), None, &options).await.unwrap();
            let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default());
            let image = image.await.unwrap();

            let bytes = Buffer::copy_of(&[1; 65536]);
            let write = image.write(0, bytes, RequestFlags::default());
            let written = Rc::new(Cell::new(false));
            let watched = written.clone();
            let write = spawn(async move {
                write.await.unwrap();
                watched.set(true);
            });
            while !ears.heard.lock().contains(&Event::WriteAio) {
                yield_now().await;
            }
            for _ in 0..20 {
                yield_now().await;
            }
            assert!(!written.get());
            ears.go_on.notify(usize::MAX);
            write.await;
            image.close().await.unwrap();
        });
    }
}
