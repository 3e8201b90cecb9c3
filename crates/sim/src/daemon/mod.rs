//! A simulator of the daemon: its graph of nodes, the jobs that change it, the monitor's
//! commands, and clients of its exports.
//!
//! A seed makes a scenario: disks with clients each, several lanes whose turns the seed
//! decides, commands at moments that have nothing to do with the clients', and a disk
//! below that completes requests in a seeded order, and fails some in a part of the
//! scenarios. At many moments of it the process dies, or the power fails. What must hold:
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
//! Equal seeds give equal scenarios.

mod bitmaps;
mod changes;
mod clients;
mod clones;
mod files;
mod filters;
mod fleece;
mod greedy;
mod lanes;
mod mirror;
mod monitor;
mod network;
mod refusals;
mod remote;
mod series;
mod sessions;
mod setup;
mod under_way;
mod verify;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use vellum_control::Nodes;
use vellum_control::daemon::{Daemon, ServerEnvironment};
use vellum_export::nbd::Exports;

use crate::cut::PowerCut;
use crate::disk::{Disk, Mode};
use crate::explore::Totals;
use crate::failure::{Failure, FailureKind, guarded};
use crate::faults::{ERRNOS, Faults};
use crate::rng::Rng;
use crate::schedule::Scheduler;
use files::SimFiles;
use lanes::Lanes;
use network::Network;
use setup::{GuestDisk, Setup, SetupParts};
pub use under_way::IDLE;
use under_way::Timetable;
use verify::Expectations;

/// Crashes at one moment: kinds and survivors differ.
const CRASHES_AT_A_MOMENT: u64 = 5;
/// Steps after which a scenario is taken to go on for ever.
const MOST_STEPS: u64 = 400_000;
/// Of a disk.
const MOST_BYTES: u64 = 2 << 20;

/// What of a scenario is not left to its seed.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// What happens in all scenarios, if not what the seed says.
    pub kind: Option<Kind>,
    /// Requests fail in all scenarios, with these errnos, or in none; otherwise in a quarter.
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
    /// All qcow2 images lie in places of their full size, and nothing fails: see [`crate::space`].
    pub fixed_images: bool,
    /// The disk is full now and then, and nothing else fails: requests wait, and none fails.
    pub fills: bool,
}

/// What happens in a scenario.
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
    /// Drawn apart, so that one more kind changes no scenario of another one.
    fn of(rng: &Rng) -> Kind {
        match Rng::new(!rng.clone().next_u64()).below(16) {
            0..=6 => Kind::Graph,
            7..=13 => Kind::Sessions,
            14 => Kind::Greedy,
            _ => Kind::Remote,
        }
    }
}

/// What a scenario is like.
#[derive(Debug, Clone)]
struct DaemonScenario {
    lanes: usize,
    disks: u64,
    clients: u64,
    requests: u64,
    commands: u64,
    size_bytes: u64,
    cluster_bits: u32,
    faults: Option<Faults>,
    uncached: bool,
    fills: bool,
    fixed_images: bool,
    kind: Kind,
}

impl DaemonScenario {
    fn of(rng: &mut Rng, settings: &Settings) -> DaemonScenario {
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
        let scenario = DaemonScenario {
            lanes: rng.between(1, 4) as usize,
            disks: if rng.chance(1, 4) { 2 } else { 1 },
            clients: rng.between(1, 3),
            requests: rng.between(10, 60),
            commands: rng.between(1, 8),
            size_bytes: (rng.between(1, 32) << cluster_bits.max(14)).min(MOST_BYTES),
            cluster_bits,
            faults,
            uncached: settings.uncached,
            fills: settings.fills,
            fixed_images: settings.fixed_images,
            kind,
        };
        if settings.fixed_images {
            return scenario.without_faults();
        }
        if settings.fills {
            let faults = Faults {
                fills_one_in: rng.between(5, 60),
                ..Faults::new(rng.next_u64())
            };
            // A snapshot, say, may fail for want of room, and with it what comes after.
            return DaemonScenario {
                commands: 0,
                faults: Some(faults),
                ..scenario
            };
        }
        match kind {
            Kind::Graph | Kind::Sessions => scenario,
            Kind::Remote => DaemonScenario {
                faults: None,
                ..scenario
            },
            Kind::Greedy => DaemonScenario {
                disks: 1,
                size_bytes: greedy::SIZE_BYTES,
                cluster_bits: 16,
                faults: None,
                ..scenario
            },
        }
    }

    /// The same with a disk that never fails, and with images on this host.
    fn without_faults(self) -> DaemonScenario {
        let kind = match self.kind {
            Kind::Sessions => Kind::Sessions,
            _ => Kind::Graph,
        };
        DaemonScenario {
            faults: None,
            kind,
            ..self
        }
    }
}

/// What playing a scenario has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Played {
    /// Crashes and completed requests.
    pub totals: Totals,
    /// How many of the crashes fell into each command that was carried out (`blockdev-reopen`), and
    /// each status of each kind of job (`blockdev-mirror: ready`); one crash may fall into several. [`IDLE`]:
    /// into none.
    pub cuts_during: BTreeMap<String, u64>,
}

/// Plays the scenario of a seed, with so many crashes on the way: half of them at any moment, half
/// while some command or job is under way, each kind of which gets as many.
///
/// # Errors
/// The first promise that was broken, with what led to it.
pub fn seed(seed: u64, crashes: u64, settings: &Settings) -> Result<Played, Failure> {
    guarded(|| play(seed, crashes, settings))
        .map_err(|failure| failure.when(&format!("daemon seed {seed}")))
}

fn play(seed: u64, crashes: u64, settings: &Settings) -> Result<Played, Failure> {
    // Once without a crash, to know how long it is; once with crashes.
    let mut timetable = Timetable::default();
    let steps = run(seed, settings, &mut |step, setup| {
        timetable.note(step, &setup.under_way);
        None
    })?;
    let mut played = Played::default();
    played.totals.steps = steps;
    // Other scenarios have crashes of their own.
    let kind = DaemonScenario::of(&mut Rng::new(seed), settings).kind;
    if crashes == 0 || matches!(kind, Kind::Greedy | Kind::Remote) {
        return Ok(played);
    }
    let mut rng = Rng::new(!seed);
    let moments = crashes.div_ceil(CRASHES_AT_A_MOMENT);
    let mut draw = |moment: u64| match moment % 2 {
        0 => rng.below(steps.max(1)),
        _ => timetable.draw(&mut rng).unwrap_or_default(),
    };
    let mut at: Vec<u64> = (0..moments).map(&mut draw).collect();
    at.sort_unstable();
    run(seed, settings, &mut |step, setup| {
        let mut failure = None;
        while at.first() == Some(&step) {
            at.remove(0);
            let here = CRASHES_AT_A_MOMENT.min(crashes - played.totals.cuts);
            played.totals.cuts += here;
            for name in setup.under_way.names() {
                *played.cuts_during.entry(name).or_default() += here;
            }
            failure = failure.or(crash(setup, &mut rng, here).err());
        }
        failure
    })?;
    Ok(played)
}

/// Crashes in several ways at this moment, and looks at what is left.
fn crash(setup: &Setup, rng: &mut Rng, crashes: u64) -> Result<(), Failure> {
    let expected = Expectations::of(setup);
    let disk = &setup.files.disk;
    for _ in 0..crashes {
        let dies = rng.chance(2, 5);
        let point = match dies {
            true => disk.death_point(),
            false => disk.cut_point(),
        };
        let contents = PowerCut::random(&point, rng).apply(&point);
        expected.verify(&contents).map_err(|failure| {
            failure.when(match dies {
                true => "after the death of the process",
                false => "after a power cut",
            })
        })?;
    }
    Ok(())
}

/// Plays a scenario; `watch` sees every step. Gives how many there were.
fn run(
    seed: u64,
    settings: &Settings,
    watch: &mut dyn FnMut(u64, &Setup) -> Option<Failure>,
) -> Result<u64, Failure> {
    let mut rng = Rng::new(seed);
    let scenario = DaemonScenario::of(&mut rng, settings);
    let disk = Disk::new(Mode::Scheduled);
    let lanes = Lanes::new(scenario.lanes, rng.next_u64());
    let mut scheduler = Scheduler::new(rng.next_u64());
    let parts = setup_parts(&scenario, &mut rng, &disk, &lanes)?;
    let setup = Setup::new(parts, rng.fork());
    let mut last = 0;
    let mut failed = None;
    if scenario.kind == Kind::Greedy {
        lanes.set_moment(greedy::MOMENT);
    }
    let kind = scenario.kind;
    let played = lanes.run(
        &disk,
        &mut scheduler,
        run_scenario(setup.clone(), scenario),
        &mut |step| {
            last = step;
            failed = setup.failure().or_else(|| watch(step, &setup));
            if step > MOST_STEPS {
                let message = "the scenario does not end";
                failed = Some(Failure::new(FailureKind::Stuck, message));
            }
            failed.is_none()
        },
    );
    // Tasks hold what holds the lanes.
    lanes.kill();
    let with_events = |failure: Failure| {
        let message = format!("{}\n  {}", failure.message, setup.last_events());
        Failure::new(failure.kind, message)
    };
    if let Some(failure) = failed.or(setup.failure()) {
        return Err(with_events(failure));
    }
    played.map_err(|stuck| with_events(stuck.into()))?;
    let expected = match kind {
        Kind::Graph | Kind::Sessions => Expectations::of(&setup),
        Kind::Greedy | Kind::Remote => Expectations::of_images(&setup),
    };
    expected
        .verify(&contents_of(&setup))
        .map_err(|failure| with_events(failure.when("after the end")))?;
    Ok(last)
}

/// What takes part: a daemon, and disks for its clients.
fn setup_parts(
    scenario: &DaemonScenario,
    rng: &mut Rng,
    disk: &Arc<Disk>,
    lanes: &Rc<Lanes>,
) -> Result<SetupParts, Failure> {
    let files = SimFiles::new(disk.clone());
    let nodes = Nodes::live_on(files.clone());
    let network = (scenario.kind != Kind::Graph).then(|| Network::new(rng.next_u64()));
    let environment = match &network {
        None => ServerEnvironment::without_sockets(),
        Some(network) => network::server_environment(network, lanes.others()),
    };
    let daemon = Daemon::new(nodes.clone(), environment);
    let exports = match (daemon.parts.try_lock(), &network) {
        (Some(mut parts), None) => parts.serve_within(),
        (Some(_), Some(network)) => {
            lanes.add(Rc::new(network.clone()));
            Exports::default()
        }
        (None, _) => return Err(Failure::new(FailureKind::Setup, "nobody else is there")),
    };
    let disks = (0..scenario.disks).map(|number| {
        let name = format!("d{number}");
        Rc::new(GuestDisk::new(
            &name,
            scenario.size_bytes,
            1 << scenario.cluster_bits,
            scenario.fixed_images,
        ))
    });
    Ok(SetupParts {
        lanes: lanes.clone(),
        files,
        daemon,
        nodes,
        network,
        exports,
        disks: disks.collect(),
        faulty: scenario.faults.is_some(),
        uncached: scenario.uncached,
        fills: scenario.fills,
    })
}

/// What the files of a daemon that is over hold.
fn contents_of(setup: &Setup) -> Vec<crate::sparse_bytes::SparseBytes> {
    let disk = &setup.files.disk;
    (0..disk.files()).map(|file| disk.contents(file)).collect()
}

/// The scenario: images, exports, clients and monitors, and the end of the daemon.
async fn run_scenario(setup: Rc<Setup>, scenario: DaemonScenario) {
    match scenario.kind {
        Kind::Greedy => return greedy::run(setup, scenario.clients).await,
        Kind::Remote => return remote::run(setup, scenario.clients, scenario.requests).await,
        Kind::Graph | Kind::Sessions => {}
    }
    if setup.network.is_some() && !sessions::serve(&setup).await {
        return;
    }
    for disk in &setup.disks {
        let raw = setup.draw(|rng| rng.chance(1, 6));
        // Half of those that jobs copy from find room whatever happens, so that the jobs are reached.
        let grows = scenario.fixed_images && setup.draw_apart(|rng| rng.chance(1, 2));
        let name = disk.new_name(match (raw, grows) {
            (true, _) => "nr",
            (false, true) => "g",
            (false, false) => "n",
        });
        let added = match raw {
            true => monitor::add_raw(&setup, disk, &name).await,
            false => monitor::add_image(&setup, disk, &name, None).await,
        };
        if !added {
            return;
        }
        monitor::export(&setup, disk, &name).await;
    }
    if scenario.fixed_images {
        for disk in &setup.disks {
            clients::fill(&setup, disk).await;
        }
    }
    setup.files.disk.set_faults(scenario.faults);
    let mut monitors = Vec::new();
    for disk in &setup.disks {
        disk.clients.set(scenario.clients as usize);
        for _ in 0..scenario.clients {
            let client = clients::client(setup.clone(), disk.clone(), scenario.requests);
            drop(setup.lanes.any().spawn(client));
        }
        let monitor = monitor::monitor(setup.clone(), disk.clone(), scenario.commands);
        monitors.push(setup.lanes.own().spawn(monitor));
    }
    for monitor in monitors {
        monitor.await;
    }
    for disk in &setup.disks {
        disk.until(|disk| disk.clients.get() == 0).await;
    }
    if setup.failure().is_some() {
        return;
    }
    setup.remember_tops();
    let closed = setup.daemon.shut_down().await;
    if let (Err(error), false) = (closed, setup.faulty) {
        setup.fail(Failure::error(FailureKind::Request, "the end", &error));
    }
}
