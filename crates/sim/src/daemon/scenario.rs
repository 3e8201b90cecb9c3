//! What a scenario is like: what its seed draws, and what the settings say instead.

use crate::faults::{ERRNOS, Faults};
use crate::rng::Rng;

/// The size of a disk at most.
const MOST_BYTES: u64 = 2 << 20;
/// The size of the disk that greedy clients ask for.
pub(super) const GREEDY_SIZE_BYTES: u64 = 1 << 40;

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
pub(super) struct DaemonScenario {
    pub(super) lanes: usize,
    pub(super) disks: u64,
    pub(super) clients: u64,
    pub(super) requests: u64,
    pub(super) commands: u64,
    pub(super) size_bytes: u64,
    pub(super) cluster_bits: u32,
    pub(super) faults: Option<Faults>,
    pub(super) uncached: bool,
    pub(super) fills: bool,
    pub(super) fixed_images: bool,
    pub(super) kind: Kind,
}

impl DaemonScenario {
    pub(super) fn of(rng: &mut Rng, settings: &Settings) -> DaemonScenario {
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
                size_bytes: GREEDY_SIZE_BYTES,
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
