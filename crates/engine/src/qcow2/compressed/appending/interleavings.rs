//! What an owner is told to be written is, whoever's write had it and whatever fails.

use super::*;
use vellum_io::sync::{block_on, chance, explore, join, thread};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

#[test]
fn what_is_said_to_be_written_is() {
    explore(|| {
        let memory = Arc::new(MemStorage::new());
        let faults = FaultStorage::new(memory.clone());
        let matching = Matching::operation(Operation::Write);
        faults.fail(matching, chance(3), Times::Once, 28);
        let appender = Arc::new(Appender::new(faults, 512));
        let threads = [1, 2, 3].map(|byte: u8| {
            let (appender, memory) = (appender.clone(), memory.clone());
            thread::spawn(move || {
                let at = usize::from(byte) * 512;
                let own = [appender.append(at as u64, &[byte; 512])];
                let written = block_on(appender.write(&own));
                let there = memory.snapshot().get(at..at + 512) == Some(&[byte; 512][..]);
                assert!(there || written.is_err(), "{byte} is not there");
            })
        });
        join(threads);
    });
}
