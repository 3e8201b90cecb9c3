//! What scenarios come to that only the engine decides.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use vellum::BlockDevice;
use vellum_io::{Buffer, Buffers, Io};
use vellum_sim::generate;
use vellum_sim::image_engine::{Files, Findings, ImageEngine};
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{ImageOptions, Preparation, Scenario};
use vellum_sim::{Explorer, engine};

/// The engine; notes where the refcount tables of the images bug that it checks.
#[derive(Debug)]
struct Watched {
    engine: Arc<dyn ImageEngine>,
    /// Offset and number of clusters, as the header has them.
    tables: Arc<Mutex<BTreeSet<Vec<u8>>>>,
}

impl ImageEngine for Watched {
    fn create(&self, files: Files, options: &ImageOptions) -> Io<()> {
        self.engine.create(files, options)
    }

    fn open(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        self.engine.open(files, options)
    }

    fn open_backing(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        self.engine.open_backing(files, options)
    }

    fn repair(&self, files: Files) -> Io<Findings> {
        self.engine.repair(files)
    }

    fn check(&self, files: Files) -> Io<Findings> {
        let header = files
            .image
            .read(48, Buffers::from_iter([Buffer::zeroed(12)]));
        let (checked, tables) = (self.engine.check(files), self.tables.clone());
        Io::boxed(async move {
            let header = header.await?;
            tables.lock().unwrap().insert(header[0].to_vec());
            checked.await
        })
    }
}

/// Whether the refcount table moves in a scenario.
fn table_moves(scenario: &Scenario, seed: u64) -> bool {
    let tables = Arc::default();
    let engine = Watched {
        engine: engine(),
        tables: Arc::clone(&tables),
    };
    let explored = Explorer::new(Arc::new(engine)).scenario(scenario, &mut Rng::new(seed), 20);
    explored.unwrap_or_else(|found| panic!("seed {seed}: {}", found.failure));
    let tables = tables.lock().unwrap();
    tables.len() > 1
}

#[test]
fn refcount_tables_outgrow_their_clusters() {
    let is_full = |scenario: &Scenario| {
        let mut preparations = scenario.preparations.iter();
        preparations.any(|one| matches!(one, Preparation::FullTable(_)))
    };
    let scenarios = (0..).map(|seed| (seed, generate::scenario(seed)));
    let full = scenarios.filter(|(_, scenario)| is_full(scenario)).take(12);
    let moves = full.filter(|(seed, scenario)| table_moves(scenario, *seed));
    let seeds: Vec<u64> = moves.map(|(seed, _)| seed).collect();
    assert!(seeds.len() >= 4, "only {seeds:?}");
}
