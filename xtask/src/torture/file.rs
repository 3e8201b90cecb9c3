//! A client that uses the disk as a file, through a FUSE export: one call of the system after the
//! other. What `fsync` has said is durable, as what a flush has.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::Result;
use rustix::fs::{FallocateFlags, fallocate};

use super::load::Load;
use super::model::{Change, GRANULE_BYTES, Model, Ticket};
use crate::random::Random;

/// What calls say of a server that is dead.
const DEAD: [i32; 3] = [libc::ENOTCONN, libc::ECONNABORTED, libc::ENODEV];

/// The file through which it changes the disk, and how.
struct Client {
    file: File,
    /// Each write is durable when it is answered.
    is_synchronous: bool,
}

/// What a request has come to.
enum End {
    Done,
    /// Nobody will tell.
    Lost,
    Failed(anyhow::Error),
}

/// Works with the file until the server is dead.
pub fn run(load: &Load<'_>, path: &Path, mut random: Random) {
    let is_synchronous = random.chance(15);
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if is_synchronous {
        options.custom_flags(libc::O_DSYNC);
    }
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if is_dead(&error) => return,
        Err(error) => return load.fail(format!("the disk as a file: {error}")),
    };
    let client = Client {
        file,
        is_synchronous,
    };
    if let Err(error) = client.work(load, &mut random) {
        load.fail(format!("a client of the file: {error:#}"));
    }
}

impl End {
    fn of(error: io::Error, what: String) -> End {
        match is_dead(&error) {
            true => End::Lost,
            false => End::Failed(anyhow::Error::new(error).context(what)),
        }
    }
}

fn is_dead(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|errno| DEAD.contains(&errno))
}

impl Client {
    fn work(&self, load: &Load<'_>, random: &mut Random) -> Result<()> {
        let size_bytes = (load.model.granules() * GRANULE_BYTES) as u64;
        let hot = random.below(load.model.granules() as u64);
        while !load.is_over() {
            let ended = match random.below(100) {
                0..8 => self.sync(load),
                kind => {
                    let granules = load.range(random, hot, size_bytes);
                    let change = match kind {
                        8..24 => None,
                        24..34 => Some(Change::Zero),
                        _ => Some(Change::Pattern(load.model.next_version())),
                    };
                    let keeps_room = random.chance(50);
                    self.request(load, granules, change, keeps_room)
                }
            };
            match ended {
                End::Done => {
                    load.answered.fetch_add(1, Ordering::Relaxed);
                    load.answered_by_file.fetch_add(1, Ordering::Relaxed);
                }
                End::Lost => return Ok(()),
                End::Failed(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self, load: &Load<'_>) -> End {
        let sent = load.model.tick();
        match self.file.sync_data() {
            Ok(()) => {
                load.model.flushed(sent);
                End::Done
            }
            Err(error) => End::of(error, "fsync".to_owned()),
        }
    }

    /// A read, or a change; nothing if other requests are in its way.
    fn request(
        &self,
        load: &Load<'_>,
        granules: Range<usize>,
        change: Option<Change>,
        keeps_room: bool,
    ) -> End {
        let ticket = match change {
            None => load.model.begin_read(granules),
            Some(change) => {
                // Zeroes are not, by themselves.
                let is_durable = self.is_synchronous && matches!(change, Change::Pattern(_));
                load.model.begin_change(granules, change, is_durable)
            }
        };
        let Some(ticket) = ticket else {
            return End::Done;
        };
        match self.perform(load.model, &ticket, keeps_room) {
            Ok(checked) => {
                load.model.end(&ticket);
                checked.map_or_else(End::Failed, |()| End::Done)
            }
            Err(error) => {
                load.model.lose(&ticket);
                let what = format!("{:?} of {:?}", ticket.change, ticket.granules);
                End::of(error, what)
            }
        }
    }

    /// What the system says, and what is wrong with what was read.
    fn perform(&self, model: &Model, ticket: &Ticket, keeps_room: bool) -> io::Result<Result<()>> {
        let at = (ticket.granules.start * GRANULE_BYTES) as u64;
        let len = ticket.granules.len() * GRANULE_BYTES;
        match ticket.change {
            None => {
                let mut bytes = vec![0; len];
                self.file.read_exact_at(&mut bytes, at)?;
                return Ok(model.check_read(ticket, &bytes));
            }
            Some(Change::Pattern(version)) => {
                let bytes = model.pattern(ticket.granules.clone(), version);
                self.file.write_all_at(&bytes, at)?;
            }
            Some(Change::Zero | Change::Trim) => {
                let mode = match keeps_room {
                    true => FallocateFlags::ZERO_RANGE,
                    false => FallocateFlags::PUNCH_HOLE,
                };
                fallocate(&self.file, mode | FallocateFlags::KEEP_SIZE, at, len as u64)?;
            }
        }
        Ok(Ok(()))
    }
}
