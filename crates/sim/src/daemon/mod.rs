//! A simulator of the daemon: its graph of nodes, the jobs that change it, the monitor's
//! commands, and clients of its exports.
//!
//! A seed makes a story: disks with clients each, several lanes whose turns the seed
//! decides, commands at moments that have nothing to do with the clients', and a disk
//! below that completes requests in a seeded order, and fails some in a part of the
//! stories. At many moments of it the process dies, or the power fails. What must hold:
//!
//! 1. Every disk, opened by the name of the image that its clients used last, holds what
//!    an acknowledged flush, or a write with FUA, says, whatever happened to the graph.
//! 2. The base of a snapshot, and a backup that is complete and closed, hold what the disk
//!    showed at one moment while the command ran.
//! 3. A bitmap that tells the next backup what to copy calls dirty all that differs from the
//!    last one, or is inconsistent.
//! 4. Every image passes the simulator's audit and the engine's check: leaks at worst.
//! 5. While the daemon runs, every read sees what the requests before it and beside it
//!    allow, no request fails (unless the disk failed one), no job and no client waits for
//!    ever, and nothing panics.
//!
//! Equal seeds give equal stories.

mod bitmaps;
mod clients;
mod files;
mod fleece;
mod greedy;
mod lanes;
mod monitor;
mod network;
mod remote;
mod scene;
mod series;
mod sessions;
mod verify;

use std::rc::Rc;
use std::sync::Arc;

use vellum_control::Nodes;
use vellum_control::daemon::{Daemon, Host};
use vellum_export::nbd::Exports;

use crate::cut::Cut;
use crate::disk::{Disk, Mode};
use crate::explore::Totals;
use crate::failure::{Failure, FailureKind, guarded};
use crate::faults::{ERRNOS, Faults};
use crate::rng::Rng;
use crate::schedule::Scheduler;
use files::SimFiles;
use lanes::Lanes;
use network::Network;
use scene::{Cast, GuestDisk, Scene};
use verify::Expectations;

/// Ends of the world at one moment: kinds and survivors differ.
const ENDS_AT_A_MOMENT: u64 = 5;
/// Steps after which a story is taken to go on for ever.
const MOST_STEPS: u64 = 400_000;
/// Of a disk.
const MOST_BYTES: u64 = 2 << 20;

/// What of a story is not left to its seed.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// What happens in all stories, if not what the seed says.
    pub kind: Option<Kind>,
    /// Requests fail in all stories, with these errnos, or in none; otherwise in a quarter.
    pub faults: Option<Vec<i32>>,
    /// What fails are flushes only.
    pub only_flushes_fail: bool,
    /// No flush fails.
    pub no_flush_fails: bool,
    /// Descriptors do not remember that a flush has failed.
    pub forgets: bool,
    /// Flushes that fail say that they have not.
    pub unreported: bool,
    /// One of so many reads and writes fails, if requests do.
    pub requests_one_in: Option<u64>,
    /// No node gathers what is written: parts of clusters go to the file as they come.
    pub uncached: bool,
    /// The size of clusters.
    pub cluster_bits: Option<u32>,
}

/// What happens in a story.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The graph changes under clients that call the exports.
    Graph,
    /// The same, and the clients speak to the exports through NBD sessions.
    Sessions,
    /// Clients ask for a whole huge disk through NBD sessions, and leave in the middle.
    Greedy,
    /// A disk of another machine, whose server dies with what it has not made durable.
    Remote,
}

impl Kind {
    /// Drawn apart, so that one more kind changes no story of another one.
    fn of(rng: &Rng) -> Kind {
        match Rng::new(!rng.clone().next_u64()).below(16) {
            0..=6 => Kind::Graph,
            7..=13 => Kind::Sessions,
            14 => Kind::Greedy,
            _ => Kind::Remote,
        }
    }
}

/// What a story is like.
#[derive(Debug, Clone)]
struct Story {
    lanes: usize,
    disks: u64,
    clients: u64,
    requests: u64,
    commands: u64,
    size_bytes: u64,
    cluster_bits: u32,
    faults: Option<Faults>,
    uncached: bool,
    kind: Kind,
}

impl Story {
    fn of(rng: &mut Rng, settings: &Settings) -> Story {
        let kind = settings.kind.unwrap_or_else(|| Kind::of(rng));
        let drawn = *rng.pick(&[9, 12, 12, 14, 16, 16, 18]);
        let cluster_bits = settings.cluster_bits.unwrap_or(drawn);
        let errnos = match &settings.faults {
            Some(errnos) => errnos.clone(),
            None if rng.chance(1, 4) => match rng.chance(1, 2) {
                true => vec![*rng.pick(ERRNOS)],
                false => ERRNOS.to_vec(),
            },
            None => Vec::new(),
        };
        let faults = (!errnos.is_empty()).then(|| Faults {
            requests_one_in: match settings.requests_one_in {
                Some(one_in) => one_in,
                None if settings.only_flushes_fail || rng.chance(1, 3) => 0,
                None => rng.between(20, 300),
            },
            flushes_one_in: match settings.no_flush_fails {
                true => 0,
                false => rng.between(5, 40),
            },
            errnos,
            forgets: settings.forgets,
            unreported: settings.unreported,
            ..Faults::new(rng.next_u64())
        });
        let story = Story {
            lanes: rng.between(1, 4) as usize,
            disks: if rng.chance(1, 4) { 2 } else { 1 },
            clients: rng.between(1, 3),
            requests: rng.between(10, 60),
            commands: rng.between(1, 8),
            size_bytes: (rng.between(1, 32) << cluster_bits.max(14)).min(MOST_BYTES),
            cluster_bits,
            faults,
            uncached: settings.uncached,
            kind,
        };
        match kind {
            Kind::Graph | Kind::Sessions => story,
            Kind::Remote => Story {
                faults: None,
                ..story
            },
            Kind::Greedy => Story {
                disks: 1,
                size_bytes: greedy::SIZE_BYTES,
                cluster_bits: 16,
                faults: None,
                ..story
            },
        }
    }
}

/// Plays the story of a seed, and ends the world so many times on the way.
///
/// # Errors
/// The first promise that was broken, with what led to it.
pub fn seed(seed: u64, ends: u64, settings: &Settings) -> Result<Totals, Failure> {
    guarded(|| play(seed, ends, settings))
        .map_err(|failure| failure.when(&format!("daemon seed {seed}")))
}

fn play(seed: u64, ends: u64, settings: &Settings) -> Result<Totals, Failure> {
    // Once without an end, to know how long it is; once with ends.
    let steps = run(seed, settings, &mut |_, _| None)?;
    // Other stories have ends of their own.
    let kind = Story::of(&mut Rng::new(seed), settings).kind;
    if ends == 0 || matches!(kind, Kind::Greedy | Kind::Remote) {
        return Ok(Totals { cuts: 0, steps });
    }
    let mut rng = Rng::new(!seed);
    let moments = ends.div_ceil(ENDS_AT_A_MOMENT);
    let mut at: Vec<u64> = (0..moments).map(|_| rng.below(steps.max(1))).collect();
    at.sort_unstable();
    let mut cuts = 0;
    run(seed, settings, &mut |step, scene| {
        let mut failure = None;
        while at.first() == Some(&step) {
            at.remove(0);
            let left = ends - cuts;
            cuts += left.min(ENDS_AT_A_MOMENT);
            let ended = end_the_world(scene, &mut rng, left.min(ENDS_AT_A_MOMENT));
            failure = failure.or(ended.err());
        }
        failure
    })?;
    Ok(Totals { cuts, steps })
}

/// Ends the world in several ways at this moment, and looks at what is left.
fn end_the_world(scene: &Scene, rng: &mut Rng, ends: u64) -> Result<(), Failure> {
    let expected = Expectations::of(scene);
    let disk = &scene.files.disk;
    for _ in 0..ends {
        let dies = rng.chance(2, 5);
        let point = match dies {
            true => disk.death_point(),
            false => disk.cut_point(),
        };
        let contents = Cut::random(&point, rng).apply(&point);
        expected.verify(&contents).map_err(|failure| {
            failure.when(match dies {
                true => "after the death of the process",
                false => "after a power cut",
            })
        })?;
    }
    Ok(())
}

/// Plays a story; `watch` sees every step. Gives how many there were.
fn run(
    seed: u64,
    settings: &Settings,
    watch: &mut dyn FnMut(u64, &Scene) -> Option<Failure>,
) -> Result<u64, Failure> {
    let mut rng = Rng::new(seed);
    let story = Story::of(&mut rng, settings);
    let disk = Disk::new(Mode::Scheduled);
    let lanes = Lanes::new(story.lanes, rng.next_u64());
    let mut scheduler = Scheduler::new(rng.next_u64());
    let cast = cast(&story, &mut rng, &disk, &lanes)?;
    let scene = Scene::new(cast, rng.fork());
    let mut last = 0;
    let mut failed = None;
    if story.kind == Kind::Greedy {
        lanes.set_moment(greedy::MOMENT);
    }
    let kind = story.kind;
    let played = lanes.run(
        &disk,
        &mut scheduler,
        tell(scene.clone(), story),
        &mut |step| {
            last = step;
            failed = scene.failure().or_else(|| watch(step, &scene));
            if step > MOST_STEPS {
                let message = "the story does not end";
                failed = Some(Failure::new(FailureKind::Stuck, message));
            }
            failed.is_none()
        },
    );
    // Tasks hold what holds the lanes.
    lanes.kill();
    let told = |failure: Failure| {
        let message = format!("{}\n  {}", failure.message, scene.told());
        Failure::new(failure.kind, message)
    };
    if let Some(failure) = failed.or(scene.failure()) {
        return Err(told(failure));
    }
    played.map_err(|stuck| told(stuck.into()))?;
    let expected = match kind {
        Kind::Graph | Kind::Sessions => Expectations::of(&scene),
        Kind::Greedy | Kind::Remote => Expectations::of_images(&scene),
    };
    expected
        .verify(&contents_of(&scene))
        .map_err(|failure| told(failure.when("after the end")))?;
    Ok(last)
}

/// Those who play: a daemon, and disks for its clients.
fn cast(
    story: &Story,
    rng: &mut Rng,
    disk: &Arc<Disk>,
    lanes: &Rc<Lanes>,
) -> Result<Cast, Failure> {
    let files = SimFiles::new(disk.clone());
    let nodes = Nodes::live_on(files.clone());
    let network = (story.kind != Kind::Graph).then(|| Network::new(rng.next_u64()));
    let host = match &network {
        None => Host::without_sockets(),
        Some(network) => network::host(network, lanes.others()),
    };
    let daemon = Daemon::new(nodes.clone(), host);
    let exports = match (daemon.parts.try_lock(), &network) {
        (Some(mut parts), None) => parts.serve_within(),
        (Some(_), Some(network)) => {
            lanes.add(Rc::new(network.clone()));
            Exports::default()
        }
        (None, _) => return Err(Failure::new(FailureKind::Setup, "nobody else is there")),
    };
    let disks = (0..story.disks).map(|number| {
        let name = format!("d{number}");
        Rc::new(GuestDisk::new(
            &name,
            story.size_bytes,
            1 << story.cluster_bits,
        ))
    });
    Ok(Cast {
        lanes: lanes.clone(),
        files,
        daemon,
        nodes,
        network,
        exports,
        disks: disks.collect(),
        faulty: story.faults.is_some(),
        uncached: story.uncached,
    })
}

/// What the files of a daemon that is over hold.
fn contents_of(scene: &Scene) -> Vec<crate::pages::Pages> {
    let disk = &scene.files.disk;
    (0..disk.files()).map(|file| disk.contents(file)).collect()
}

/// The story: images, exports, clients and monitors, and the end of the daemon.
async fn tell(scene: Rc<Scene>, story: Story) {
    match story.kind {
        Kind::Greedy => return greedy::tell(scene, story.clients).await,
        Kind::Remote => return remote::tell(scene, story.clients, story.requests).await,
        Kind::Graph | Kind::Sessions => {}
    }
    if scene.network.is_some() && !sessions::serve(&scene).await {
        return;
    }
    for disk in &scene.disks {
        let raw = scene.draw(|rng| rng.chance(1, 6));
        let name = disk.new_name(if raw { "nr" } else { "n" });
        let added = match raw {
            true => monitor::add_raw(&scene, disk, &name).await,
            false => monitor::add_image(&scene, disk, &name, None).await,
        };
        if !added {
            return;
        }
        monitor::export(&scene, disk, &name).await;
    }
    scene.files.disk.set_faults(story.faults);
    let mut monitors = Vec::new();
    for disk in &scene.disks {
        disk.clients.set(story.clients as usize);
        for _ in 0..story.clients {
            let client = clients::client(scene.clone(), disk.clone(), story.requests);
            drop(scene.lanes.any().spawn(client));
        }
        let told = monitor::monitor(scene.clone(), disk.clone(), story.commands);
        monitors.push(scene.lanes.own().spawn(told));
    }
    for monitor in monitors {
        monitor.await;
    }
    for disk in &scene.disks {
        disk.until(|disk| disk.clients.get() == 0).await;
    }
    if scene.failure().is_some() {
        return;
    }
    scene.remember_tops();
    let closed = scene.daemon.shut_down().await;
    if let (Err(error), false) = (closed, scene.faulty) {
        scene.fail(Failure::error(FailureKind::Request, "the end", &error));
    }
}
