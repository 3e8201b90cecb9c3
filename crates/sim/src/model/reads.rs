//! What a read may see.

use super::Model;
use super::sector::{Candidate, LogicalTime, Mismatch, pieces};
use crate::pattern::{self, SECTOR_LEN, Value};
use crate::sparse_bytes::SECTOR_BYTES;

impl Model {
    /// Checks the bytes that a read, begun at `begun`, has seen. A sector that no
    /// running change covers keeps from now on the value that was seen.
    pub fn end_read(
        &mut self,
        begun: LogicalTime,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), Mismatch> {
        self.now += 1;
        let inside = self.least_size_bytes().saturating_sub(offset_bytes);
        let bytes = &bytes[..bytes.len().min(inside as usize)];
        for (sector, start, part) in pieces(offset_bytes, bytes) {
            if !self.sectors.contains_key(&sector) {
                self.check_base(sector, start, part)?;
                continue;
            }
            let value = self.find(sector, begun, start, part)?;
            let now = self.now;
            let Some(state) = self.sectors.get_mut(&sector) else {
                continue;
            };
            let settled = state.changed_at <= begun
                && part.len() == SECTOR_LEN
                && state
                    .candidates
                    .iter()
                    .all(|candidate| candidate.includes == 0);
            if settled && state.candidates.len() > 1 {
                let before = std::mem::take(&mut state.candidates);
                state.candidates.push(Candidate { value, includes: 0 });
                state.retire(&before, now);
            }
        }
        Ok(())
    }

    pub(super) fn holds(&self, value: Value, start: u64, part: &[u8]) -> bool {
        match value {
            Value::Zero => vellum_io::buffer::is_zero(part),
            Value::Written(id) => pattern::matches(id, start, part),
            Value::Mixed(index) => {
                let inside = (start % SECTOR_BYTES) as usize;
                self.mixed[index as usize][inside..inside + part.len()] == *part
            }
        }
    }

    fn check_base(&self, sector: u64, start: u64, part: &[u8]) -> Result<(), Mismatch> {
        let value = self.base(sector);
        if self.holds(value, start, part) {
            return Ok(());
        }
        Err(self.mismatch(sector, part, &[value]))
    }

    /// The allowed value that `part` of a sector holds.
    fn find(
        &self,
        sector: u64,
        begun: LogicalTime,
        start: u64,
        part: &[u8],
    ) -> Result<Value, Mismatch> {
        let state = &self.sectors[&sector];
        let now = state.candidates.iter().map(|candidate| candidate.value);
        let before = state.retired.iter().filter(|old| old.at >= begun);
        let before = before.map(|old| old.candidate.value);
        let mut allowed = Vec::new();
        for value in now.chain(before) {
            if self.holds(value, start, part) {
                return Ok(value);
            }
            allowed.push(value);
        }
        Err(self.mismatch(sector, part, &allowed))
    }

    pub(super) fn mismatch(&self, sector: u64, part: &[u8], allowed: &[Value]) -> Mismatch {
        let allowed: Vec<String> = allowed
            .iter()
            .map(|value| match value {
                Value::Zero => "zeroes".to_owned(),
                Value::Written(id) => format!("write {id}"),
                Value::Mixed(_) => pattern::describe(&self.content(*value, sector)),
            })
            .collect();
        let found = pattern::describe(part);
        let message = format!(
            "guest sector {sector} holds {found}, not {}",
            allowed.join(" or ")
        );
        Mismatch { sector, message }
    }
}
