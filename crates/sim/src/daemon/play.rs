//! Plays the scenario of a seed: once to know how long it is, and once with crashes.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use vellum_daemon::{Daemon, ServerEnvironment};
use vellum_export::nbd::Exports;
use vellum_graph::Nodes;

use super::files::SimFiles;
use super::guest_disk::GuestDisk;
use super::lanes::Lanes;
use super::network::{self, Network};
use super::scenario::{DaemonScenario, Kind, Settings};
use super::setup::{Setup, SetupParts};
use super::under_way::Timetable;
use super::verify::Expectations;
use super::{clients, exports, greedy, images, monitor, remote, sessions};
use crate::cut::PowerCut;
use crate::disk::{Disk, Mode};
use crate::explore::Totals;
use crate::failure::{Failure, FailureKind, guarded};
use crate::rng::Rng;
use crate::schedule::Scheduler;
use crate::sparse_bytes::SparseBytes;

/// Crashes at one moment: kinds and survivors differ.
const CRASHES_AT_A_MOMENT: u64 = 5;
/// Steps after which a scenario is taken to go on for ever.
const MOST_STEPS: u64 = 400_000;

/// What playing a scenario has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Played {
    /// Crashes and completed requests.
    pub totals: Totals,
    /// How many of the crashes fell into each command that was carried out (`blockdev-reopen`), and
    /// each status of each kind of job (`blockdev-mirror: ready`); one crash may fall into several.
    /// [`IDLE`](super::IDLE): into none.
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
        let (point, how) = match rng.below(5) {
            0 => (disk.death_point(), "after the death of the process"),
            1 => {
                let failed = |failure: Failure| failure.when("after the death of the process");
                let point = expected.outlive(&disk.cut_point(), rng).map_err(failed)?;
                (
                    point,
                    "after a power cut under the process after one that died",
                )
            }
            _ => (disk.cut_point(), "after a power cut"),
        };
        let contents = PowerCut::random(&point, rng).apply(&point);
        expected
            .verify(&contents)
            .map_err(|failure| failure.when(how))?;
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
fn contents_of(setup: &Setup) -> Vec<SparseBytes> {
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
            true => images::add_raw(&setup, disk, &name).await,
            false => images::add_image(&setup, disk, &name, None).await,
        };
        if !added {
            return;
        }
        exports::export(&setup, disk, &name).await;
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
