//! While a link is drained none of its requests runs and none begins; all of them run in the
//! end, and every drain ends.

use super::shortcut::{Entered, Shortcut};
use super::*;
use vellum_io::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use vellum_io::sync::{block_on, explore, join, point, thread};

#[test]
fn no_request_runs_while_a_link_is_drained() {
    explore(|| {
        let link = Link::new(nothing().expect("a device"));
        let running = Arc::new(AtomicUsize::new(0));
        let requests = [2, 1].map(|times| {
            let (link, running) = (link.clone(), running.clone());
            thread::spawn(move || {
                for _ in 0..times {
                    let (_, ticket) = match Core::enter(&link.core) {
                        Some(entered) => entered,
                        None => block_on(Core::wait_and_enter(&link.core)),
                    };
                    running.fetch_add(1, SeqCst);
                    point();
                    running.fetch_sub(1, SeqCst);
                    drop(ticket);
                }
            })
        });
        let drains = [2, 1].map(|times| {
            let (link, running) = (link.clone(), running.clone());
            thread::spawn(move || {
                for _ in 0..times {
                    let drained = block_on(link.drain());
                    assert_eq!(running.load(SeqCst), 0, "a request runs");
                    drop(drained.set(nothing().expect("a device")));
                    assert_eq!(running.load(SeqCst), 0, "a request has begun");
                }
            })
        });
        join(requests.into_iter().chain(drains));
        let state = link.core.lock();
        assert_eq!((state.running, state.drains), (0, 0));
    });
}

#[test]
fn no_request_passes_a_link_that_is_drained() {
    explore(|| {
        let links = [(); 2].map(|()| Link::new(nothing().expect("a device")));
        let running = Arc::new(AtomicUsize::new(0));
        let current = Arc::new(Mutex::new(None::<Arc<Shortcut<()>>>));
        let requests = [2, 1].map(|times| {
            let (links, running, current) = (links.clone(), running.clone(), current.clone());
            thread::spawn(move || {
                for _ in 0..times {
                    let known = current.lock().clone();
                    let shortcut = known.unwrap_or_else(Shortcut::new);
                    let takes =
                        |link: &Arc<Link>| shortcut.take(link, &link.target(), Stretch::Past);
                    if links.iter().all(takes) && shortcut.open(Some(())) {
                        *current.lock() = Some(shortcut.clone());
                    }
                    if let Entered::Passage(passage) = shortcut.enter() {
                        running.fetch_add(1, SeqCst);
                        point();
                        running.fetch_sub(1, SeqCst);
                        drop(passage);
                    } else {
                        *current.lock() = None;
                    }
                }
            })
        });
        let drains = [0, 1].map(|which| {
            let (links, running) = (links.clone(), running.clone());
            thread::spawn(move || {
                let drained = block_on(links[which].drain());
                assert_eq!(running.load(SeqCst), 0, "a request passes");
                drop(drained.set(nothing().expect("a device")));
                point();
                assert_eq!(running.load(SeqCst), 0, "a request has passed");
            })
        });
        join(requests.into_iter().chain(drains));
    });
}
