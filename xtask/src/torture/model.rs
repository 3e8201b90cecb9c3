//! What a disk must hold, granule by granule, whatever happened to its server.
//!
//! Everything that clients write describes itself: a granule names the write and its own
//! place. Of two requests in flight at a time none overlap, so the changes of a granule have
//! one order, and what it may hold after a kill is: what an acknowledged flush (or FUA) made
//! durable last, or anything written since.

use std::fs::File;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Result, bail};

/// The smallest piece whose content is known, in bytes: requests are made of these.
pub const GRANULE_BYTES: usize = 64;
/// The value of a granule whose content is one of several.
const UNSURE: u32 = u32::MAX;
/// A time that has not come.
const NEVER: u64 = u64::MAX;
/// The end of a list of candidates.
const NOTHING: u32 = u32::MAX;

/// Logs of images that one disk may have.
pub const MOST_LOGS: usize = 6;

/// How long the logs of the images were at a time, in bytes.
pub type Mark = [u64; MOST_LOGS];

/// Whether logs that were so long at `mark` may be no longer at `bound`.
fn is_within(mark: &Mark, bound: &Mark) -> bool {
    mark.iter().zip(bound).all(|(mark, bound)| mark <= bound)
}

/// How a range is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Filled with bytes that name this version.
    Pattern(u32),
    /// Made zeroes.
    Zero,
    /// Made zeroes, or left alone.
    Trim,
}

/// A change that was asked for.
#[derive(Debug, Clone)]
struct Entry {
    granules: Range<usize>,
    change: Change,
    sent: u64,
    acknowledged: u64,
    fua: bool,
    /// What stood in the logs before it was sent, and when it was acknowledged.
    sent_mark: Mark,
    acknowledged_mark: Mark,
}

/// Which changes a content must have, and which it may have.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// What was acknowledged before is there.
    pub from: u64,
    /// What was sent later is not.
    pub to: u64,
    /// Whether FUA counts: not for a picture of the disk at a moment.
    fua: bool,
    /// How much of the logs there was; what was acknowledged later is not promised.
    bound: Option<Mark>,
}

#[derive(Debug, Default)]
struct State {
    tick: u64,
    version: u32,
    /// What each granule holds, as clients see it.
    now: Vec<u32>,
    /// What each granule held when the round began.
    before: Vec<u32>,
    /// Ranges of requests in flight, and whether they change something.
    busy: Vec<(Range<usize>, bool)>,
    log: Vec<Entry>,
    /// When the last flush that was acknowledged was sent.
    flushed: u64,
    flushes: u64,
    /// The logs of the images, if there are any.
    logs: Vec<File>,
    /// When each acknowledged flush was sent, and what stood in the logs when it was
    /// acknowledged.
    flush_marks: Vec<(u64, Mark)>,
}

/// What a disk must hold.
#[derive(Debug)]
pub struct Model {
    seed: u64,
    state: Mutex<State>,
}

/// A request that was let in.
#[derive(Debug)]
pub struct Ticket {
    /// Its granules.
    pub granules: Range<usize>,
    /// What it changes them to; `None`: a read.
    pub change: Option<Change>,
    entry: usize,
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Model {
    /// A disk of `granules` granules of zeroes.
    pub fn new(seed: u64, granules: usize) -> Self {
        let state = State {
            now: vec![0; granules],
            before: vec![0; granules],
            ..State::default()
        };
        Model {
            seed,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many granules the disk has.
    pub fn granules(&self) -> usize {
        self.lock().now.len()
    }

    /// The bytes of a granule.
    fn granule(&self, value: u32, place: usize) -> [u8; GRANULE_BYTES] {
        let mut bytes = [0; GRANULE_BYTES];
        if value == 0 {
            return bytes;
        }
        let head = u64::from(value) << 32 | place as u64;
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            let filler = mix(head ^ self.seed.rotate_left(7) ^ (index as u64) << 56);
            let number = if index == 0 { head } else { filler };
            word.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The bytes of a range that holds one version.
    pub fn pattern(&self, granules: Range<usize>, version: u32) -> Vec<u8> {
        granules.flat_map(|at| self.granule(version, at)).collect()
    }

    /// Which version a granule holds: `None` if these are no bytes that were ever written
    /// there.
    fn decode(&self, bytes: &[u8], place: usize) -> Option<u32> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Some(0);
        }
        let mut head = [0; 8];
        head.copy_from_slice(&bytes[..8]);
        let version = (u64::from_le_bytes(head) >> 32) as u32;
        (version != UNSURE && self.granule(version, place) == *bytes).then_some(version)
    }

    /// The number of a write that comes now.
    pub fn next_version(&self) -> u32 {
        let mut state = self.lock();
        state.version += 1;
        state.version
    }

    /// Lets a change in, if nothing that it overlaps with is in flight.
    pub fn begin_change(
        &self,
        granules: Range<usize>,
        change: Change,
        fua: bool,
    ) -> Option<Ticket> {
        let mut state = self.lock();
        if granules.end > state.now.len() || state.overlaps(&granules, |_| true) {
            return None;
        }
        state.busy.push((granules.clone(), true));
        state.tick += 1;
        let entry = Entry {
            granules: granules.clone(),
            change,
            sent: state.tick,
            acknowledged: NEVER,
            fua,
            sent_mark: state.mark(),
            acknowledged_mark: [NEVER; MOST_LOGS],
        };
        state.log.push(entry);
        Some(Ticket {
            granules,
            change: Some(change),
            entry: state.log.len() - 1,
        })
    }

    /// Lets a read in, if no change of the range is in flight.
    pub fn begin_read(&self, granules: Range<usize>) -> Option<Ticket> {
        let mut state = self.lock();
        if granules.end > state.now.len() || state.overlaps(&granules, |changes| changes) {
            return None;
        }
        state.busy.push((granules.clone(), false));
        Some(Ticket {
            granules,
            change: None,
            entry: usize::MAX,
        })
    }

    /// Notes that a request was acknowledged.
    pub fn end(&self, ticket: &Ticket) {
        let mut state = self.lock();
        state.leave(ticket);
        let Some(change) = ticket.change else {
            return;
        };
        state.tick += 1;
        let tick = state.tick;
        let mark = state.mark();
        state.log[ticket.entry].acknowledged = tick;
        state.log[ticket.entry].acknowledged_mark = mark;
        for value in &mut state.now[ticket.granules.clone()] {
            *value = match change {
                Change::Pattern(version) => version,
                Change::Zero => 0,
                Change::Trim if *value == 0 => 0,
                Change::Trim => UNSURE,
            };
        }
    }

    /// Notes that nobody will ever tell what became of a request. It must have ended.
    pub fn lose(&self, ticket: &Ticket) {
        let mut state = self.lock();
        state.leave(ticket);
        if ticket.change.is_some() {
            state.now[ticket.granules.clone()].fill(UNSURE);
        }
    }

    /// The time at which a flush is sent, or anything else begins.
    pub fn tick(&self) -> u64 {
        let mut state = self.lock();
        state.tick += 1;
        state.tick
    }

    /// Notes that a flush which was sent then was acknowledged.
    pub fn flushed(&self, sent: u64) {
        let mut state = self.lock();
        state.flushed = state.flushed.max(sent);
        state.flushes += 1;
        let mark = state.mark();
        if !state.logs.is_empty() {
            state.flush_marks.push((sent, mark));
        }
    }

    /// Checks what a read has brought, before its end is noted.
    pub fn check_read(&self, ticket: &Ticket, bytes: &[u8]) -> Result<()> {
        let values = self.lock().now[ticket.granules.clone()].to_vec();
        for (index, (value, found)) in values.iter().zip(bytes.chunks(GRANULE_BYTES)).enumerate() {
            let place = ticket.granules.start + index;
            if *value != UNSURE && self.granule(*value, place) != *found {
                let offset = place * GRANULE_BYTES;
                bail!(
                    "a read at {offset} found {}, not version {value}",
                    self.described(found, place)
                );
            }
        }
        Ok(())
    }

    fn described(&self, bytes: &[u8], place: usize) -> String {
        match self.decode(bytes, place) {
            Some(0) => "zeroes".to_owned(),
            Some(version) => format!("version {version}"),
            None => format!("other bytes ({:02x?}...)", &bytes[..16.min(bytes.len())]),
        }
    }

    /// What the disk must hold now that the server is dead.
    pub fn after_kill(&self) -> Moment {
        Moment {
            from: self.lock().flushed,
            to: NEVER,
            fua: true,
            bound: None,
        }
    }

    /// Has the lengths of a log be noted with everything from now on; its number.
    pub fn record(&self, log: File) -> usize {
        let mut state = self.lock();
        state.logs.push(log);
        state.logs.len() - 1
    }

    /// What the disk must hold if the power fails when the logs are so long.
    pub fn at_cut(&self, bound: Mark) -> Moment {
        let state = self.lock();
        let flushes = state.flush_marks.iter();
        let covered = flushes.filter(|(_, mark)| is_within(mark, &bound));
        Moment {
            from: covered.map(|(sent, _)| *sent).max().unwrap_or(0),
            to: NEVER,
            fua: true,
            bound: Some(bound),
        }
    }

    /// What a picture of the disk must hold that was taken between two times.
    pub fn picture(from: u64, to: u64) -> Moment {
        Moment {
            from,
            to,
            fua: false,
            bound: None,
        }
    }

    /// Checks a content of the whole disk; what each granule holds.
    ///
    /// # Errors
    /// How many granules hold what they may not, and the first of them.
    pub fn judge(&self, content: &[u8], moment: Moment) -> Result<Vec<u32>> {
        let state = self.lock();
        let allowed = Allowed::new(&state, moment);
        let mut found = Vec::with_capacity(state.before.len());
        let (mut wrong, mut first) = (0, String::new());
        for (place, bytes) in content.chunks(GRANULE_BYTES).enumerate() {
            let version = self.decode(bytes, place);
            if !version.is_some_and(|version| allowed.has(place, version)) {
                wrong += 1;
                if wrong == 1 {
                    let what = self.described(bytes, place);
                    let may = allowed.all(place);
                    let at = place * GRANULE_BYTES;
                    first = format!("at {at} there is {what}; allowed are versions {may:?}");
                }
            }
            found.push(version.unwrap_or(0));
        }
        match wrong {
            0 => Ok(found),
            _ => bail!("{wrong} of {} granules are wrong: {first}", found.len()),
        }
    }

    /// Begins another round, with a disk that holds this.
    pub fn restart(&self, content: Vec<u32>) {
        let mut state = self.lock();
        state.now.clone_from(&content);
        state.before = content;
        state.log.clear();
        state.busy.clear();
        state.flushed = 0;
        state.flushes = 0;
        state.logs.clear();
        state.flush_marks.clear();
    }

    /// Has the disk hold more granules, of zeroes.
    pub fn grow(&self, granules: usize) {
        let mut state = self.lock();
        state.now.resize(granules, 0);
        state.before.resize(granules, 0);
    }

    /// Has the disk hold fewer granules: the last ones were never used.
    pub fn shrink(&self, granules: usize) {
        let mut state = self.lock();
        state.now.truncate(granules);
        state.before.truncate(granules);
    }

    /// Changes and flushes that were acknowledged in this round.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.lock();
        let changes = state.log.iter().filter(|one| one.acknowledged != NEVER);
        (changes.count() as u64, state.flushes)
    }
}

impl State {
    fn mark(&self) -> Mark {
        let mut mark = [0; MOST_LOGS];
        for (length, log) in mark.iter_mut().zip(&self.logs) {
            // A log of unknown length promises nothing.
            *length = log.metadata().map_or(NEVER, |found| found.len());
        }
        mark
    }

    fn overlaps(&self, granules: &Range<usize>, matters: impl Fn(bool) -> bool) -> bool {
        self.busy.iter().any(|(other, changes)| {
            matters(*changes) && other.start < granules.end && granules.start < other.end
        })
    }

    fn leave(&mut self, ticket: &Ticket) {
        let wanted = (ticket.granules.clone(), ticket.change.is_some());
        if let Some(index) = self.busy.iter().position(|one| *one == wanted) {
            self.busy.swap_remove(index);
        }
    }
}

impl Moment {
    fn may_have(&self, entry: &Entry) -> bool {
        let begun = self
            .bound
            .is_none_or(|bound| is_within(&entry.sent_mark, &bound));
        begun && entry.sent <= self.to
    }

    fn must_have(&self, entry: &Entry) -> bool {
        let known = self
            .bound
            .is_none_or(|bound| is_within(&entry.acknowledged_mark, &bound));
        let acknowledged = entry.acknowledged != NEVER && known;
        entry.acknowledged <= self.from || self.fua && entry.fua && acknowledged
    }
}

/// What each granule may hold.
struct Allowed {
    durable: Vec<u32>,
    /// Where the list of other values begins in `more`.
    heads: Vec<u32>,
    /// A value and where the list goes on.
    more: Vec<(u32, u32)>,
}

impl Allowed {
    fn new(state: &State, moment: Moment) -> Self {
        let mut allowed = Allowed {
            durable: state.before.clone(),
            heads: vec![NOTHING; state.before.len()],
            more: Vec::new(),
        };
        for entry in state.log.iter().filter(|entry| moment.may_have(entry)) {
            let durable = moment.must_have(entry);
            for place in entry.granules.clone() {
                match entry.change {
                    Change::Pattern(version) => allowed.note(place, version, durable),
                    Change::Zero => allowed.note(place, 0, durable),
                    Change::Trim => allowed.note(place, 0, false),
                }
            }
        }
        allowed
    }

    fn note(&mut self, place: usize, value: u32, durable: bool) {
        if durable {
            self.durable[place] = value;
            self.heads[place] = NOTHING;
        } else {
            self.more.push((value, self.heads[place]));
            self.heads[place] = (self.more.len() - 1) as u32;
        }
    }

    fn all(&self, place: usize) -> Vec<u32> {
        let Some(durable) = self.durable.get(place) else {
            return vec![0];
        };
        let mut values = vec![*durable];
        let mut next = self.heads[place];
        while next != NOTHING {
            let (value, after) = self.more[next as usize];
            values.push(value);
            next = after;
        }
        values
    }

    fn has(&self, place: usize, value: u32) -> bool {
        let Some(durable) = self.durable.get(place) else {
            return value == 0;
        };
        *durable == value || self.heads[place] != NOTHING && self.all(place).contains(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(model: &Model, values: &[u32]) -> Vec<u8> {
        let granules = values.iter().enumerate();
        granules
            .flat_map(|(place, value)| model.granule(*value, place))
            .collect()
    }

    fn write(model: &Model, granules: Range<usize>, fua: bool) -> (u32, Ticket) {
        let version = model.next_version();
        let ticket = model.begin_change(granules, Change::Pattern(version), fua);
        (version, ticket.expect("nothing is in the way"))
    }

    #[test]
    fn what_a_flush_covers_must_be_there_and_what_came_later_may() {
        let model = Model::new(1, 4);
        let (first, ticket) = write(&model, 0..2, false);
        model.end(&ticket);
        let sent = model.tick();
        let (second, ticket) = write(&model, 1..3, false);
        model.flushed(sent);
        let judge = |values: &[u32]| model.judge(&content(&model, values), model.after_kill());
        for may in [
            [first, first, 0, 0],
            [first, second, second, 0],
            [first, second, 0, 0],
        ] {
            assert_eq!(judge(&may).expect("allowed"), may);
        }
        for must_not in [[0, first, 0, 0], [first, 0, 0, 0], [first, first, 0, first]] {
            judge(&must_not).expect_err("a lost or a strange version");
        }
        model.lose(&ticket);
        let (third, ticket) = write(&model, 2..3, true);
        model.end(&ticket);
        let judge = |values: &[u32]| model.judge(&content(&model, values), model.after_kill());
        judge(&[first, first, third, 0]).expect("FUA is durable by itself");
        judge(&[first, first, second, 0]).expect_err("and what it replaced is gone");
        let mut bytes = content(&model, &[first, first, third, 0]);
        bytes[200] ^= 1;
        model
            .judge(&bytes, model.after_kill())
            .expect_err("one bit");
    }

    #[test]
    fn a_trim_may_do_nothing_and_requests_in_flight_do_not_overlap() {
        let model = Model::new(2, 4);
        let (version, ticket) = write(&model, 0..4, false);
        assert!(model.begin_change(3..4, Change::Zero, false).is_none());
        assert!(model.begin_read(0..1).is_none());
        model.end(&ticket);
        let trim = model.begin_change(0..1, Change::Trim, false).expect("free");
        model.end(&trim);
        model.flushed(model.tick());
        for first in [0, version] {
            let values = [first, version, version, version];
            model
                .judge(&content(&model, &values), model.after_kill())
                .expect("both may be");
        }
        let read = model.begin_read(0..4).expect("free");
        let bytes = content(&model, &[0, version, version, version]);
        model.check_read(&read, &bytes).expect("as it must be");
        let bytes = content(&model, &[0, version, 0, version]);
        model.check_read(&read, &bytes).expect_err("not trimmed");
    }

    #[test]
    fn what_was_acknowledged_when_the_log_was_longer_is_not_promised_at_a_cut() {
        let file = tempfile::tempfile().expect("a file for a log");
        let model = Model::new(4, 3);
        model.record(file.try_clone().expect("another handle"));
        let (first, ticket) = write(&model, 0..1, false);
        file.set_len(1000).expect("a longer log");
        model.end(&ticket);
        model.flushed(model.tick());
        let (second, ticket) = write(&model, 1..2, true);
        file.set_len(2000).expect("a longer log");
        model.end(&ticket);
        let (third, ticket) = write(&model, 0..1, false);
        model.end(&ticket);
        let judge = |values: &[u32], length: u64| {
            let mut bound = [0; MOST_LOGS];
            bound[0] = length;
            model.judge(&content(&model, values), model.at_cut(bound))
        };
        judge(&[0, 0, 0], 999).expect("nothing is promised yet");
        judge(&[0, 0, 0], 1000).expect_err("the flush is lost");
        judge(&[first, 0, 0], 1999).expect("the durable write was not acknowledged");
        judge(&[first, second, 0], 1000).expect("and may be there");
        judge(&[first, second, 0], 999).expect_err("but was not sent yet");
        judge(&[first, 0, 0], 2000).expect_err("the durable write is lost");
        judge(&[third, second, 0], 2000).expect("sent when the log was so long");
        judge(&[third, second, 0], 1999).expect_err("from the future");
    }

    #[test]
    fn a_picture_has_what_was_acknowledged_before_and_nothing_from_later() {
        let model = Model::new(3, 3);
        let (first, ticket) = write(&model, 0..1, false);
        model.end(&ticket);
        let from = model.tick();
        let (second, ticket) = write(&model, 1..2, true);
        let to = model.tick();
        model.end(&ticket);
        let (third, ticket) = write(&model, 2..3, false);
        model.end(&ticket);
        let picture = Model::picture(from, to);
        let judge = |values: &[u32]| model.judge(&content(&model, values), picture);
        judge(&[first, 0, 0]).expect("before");
        judge(&[first, second, 0]).expect("meanwhile");
        judge(&[0, 0, 0]).expect_err("lacks what was there");
        judge(&[first, 0, third]).expect_err("has what came later");
    }
}
