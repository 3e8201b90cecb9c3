//! Clients that ask for a whole huge disk, and leave in the middle of it; or are hung up on,
//! since their export goes or the daemon ends. What is done for them must end soon.

use std::net::Shutdown;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::json;
use vellum_export::nbd::Export;
use vellum_io::{Buffer, Buffers, lane};
use vellum_nbd::client::handshake::Handshake;
use vellum_nbd::client::{Connection, Request};
use vellum_nbd::request::RequestHeader;
use vellum_nbd::{Channel, proto};

use super::exports::export;
use super::guest_disk::GuestDisk;
use super::images::add_image;
use super::scenario::GREEDY_SIZE_BYTES;
use super::sessions::{self, PORT};
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};

/// How long anything that must end soon may take. Every turn and every step takes
/// [`MOMENT`], so this is also how many of them there may be.
const SOON: Duration = Duration::from_secs(2);
/// What a turn or a step takes.
pub(super) const MOMENT: Duration = Duration::from_micros(500);
/// How often a client is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// How a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientExit {
    /// It closes its socket.
    Closes,
    /// It says that it sends nothing more, and receives no more.
    HalfCloses,
    /// The network forgets all connections.
    Reset,
    /// It stays, and receives nothing.
    Deaf,
}

/// Plays the whole scenario: clients come, ask, and leave; the export goes, or the daemon ends.
pub(super) async fn run(setup: Rc<Setup>, clients: u64) {
    let disk = setup.disks[0].clone();
    let name = disk.new_name("n");
    if !sessions::serve(&setup).await || !add_image(&setup, &disk, &name, None).await {
        return;
    }
    let rounds = setup.draw(|rng| rng.between(1, 3));
    for _ in 0..rounds {
        export(&setup, &disk, &name).await;
        if setup.failure().is_some() {
            return;
        }
        write_some(&setup, &disk).await;
        let staying = let_clients_be(&setup, &disk, clients).await;
        disk.device.replace(None);
        if setup.failure().is_some() || setup.draw(|rng| rng.chance(1, 4)) {
            break;
        }
        remove(&setup, &disk).await;
        drop(staying);
        if setup.failure().is_some() {
            return;
        }
    }
    // As the daemon does at its end, before it closes its nodes, which may take longer.
    let ended = setup.demand("nbd-server-stop", json!({}));
    soon(&setup, "the end of the server", ended).await;
    if setup.failure().is_none()
        && let Err(error) = setup.daemon.shut_down().await
    {
        setup.fail(Failure::error(FailureKind::Request, "the end", &error));
    }
}

/// Puts something on the disk here and there.
async fn write_some(setup: &Setup, disk: &GuestDisk) {
    let Some(device) = disk.device.borrow().clone() else {
        return;
    };
    for _ in 0..setup.draw(|rng| rng.below(8)) {
        let mut offset = setup.draw(|rng| rng.below(GREEDY_SIZE_BYTES >> 16) << 16);
        if setup.draw(|rng| rng.chance(1, 2)) {
            offset %= 64 << 20;
        }
        let data = Buffer::zeroed(setup.draw(|rng| 512 * rng.between(1, 256)) as usize);
        if let Err(error) = device.write(offset, data, Default::default()).await {
            setup.fail(Failure::error(FailureKind::Request, "write", &error));
        }
    }
}

/// Has clients come, ask, and leave; gives those that stay, who receive nothing.
async fn let_clients_be(setup: &Rc<Setup>, disk: &GuestDisk, clients: u64) -> Vec<Channel> {
    let mut staying = Vec::new();
    for _ in 0..clients {
        let Some(export) = export_of(setup, disk) else {
            return staying;
        };
        let before = export.connections();
        let Some((channel, connection)) = join(setup, disk).await else {
            return staying;
        };
        let farewells = [
            ClientExit::Closes,
            ClientExit::HalfCloses,
            ClientExit::Reset,
            ClientExit::Deaf,
            ClientExit::Deaf,
        ];
        let farewell = setup.draw(|rng| *rng.pick(&farewells));
        setup.note(format!("a client: {farewell:?}"));
        for number in 0..setup.draw(|rng| rng.between(1, 5)) {
            let question = draw(setup);
            setup.note(format!("asks: {question:?}"));
            ask(setup, &channel, &connection, question, farewell, number);
        }
        setup.pause().await;
        lane::sleep(Duration::from_millis(setup.draw(|rng| rng.below(100)))).await;
        // None of these fails: see the network.
        match farewell {
            ClientExit::Closes => drop(channel.shutdown(Shutdown::Both)),
            ClientExit::HalfCloses => drop(channel.shutdown(Shutdown::Write)),
            ClientExit::Reset => {
                staying.clear();
                if let Some(network) = &setup.network {
                    network.reset(PORT, true);
                }
                expect_few(setup, &export, 0).await;
            }
            ClientExit::Deaf => staying.push(channel),
        }
        if matches!(farewell, ClientExit::Closes | ClientExit::HalfCloses) {
            expect_few(setup, &export, before).await;
        }
    }
    staying
}

/// Asks without waiting for the answer.
fn ask(
    setup: &Setup,
    channel: &Channel,
    connection: &Arc<Connection>,
    question: Request,
    farewell: ClientExit,
    number: u64,
) {
    if farewell != ClientExit::Deaf {
        let connection = connection.clone();
        let asked = async move { drop(connection.ask(question).await) };
        return drop(setup.lanes.any().spawn(asked));
    }
    let header = RequestHeader {
        flags: question.flags,
        command: question.command,
        cookie: number,
        offset_bytes: question.offset_bytes,
        len_bytes: question.len_bytes,
    };
    let mut bytes = Vec::new();
    header.encode(connection.session().framing, &mut bytes);
    let channel = channel.clone();
    // The server may be gone by then.
    let sent = async move { drop(channel.send_bytes(&bytes).await) };
    drop(setup.lanes.own().spawn(sent));
}

async fn join(setup: &Setup, disk: &GuestDisk) -> Option<(Channel, Arc<Connection>)> {
    let network = setup.network.as_ref()?;
    let connected = async {
        let channel = Channel::from(network.connect(PORT)?);
        let handshake = Handshake::new(channel);
        let context = proto::CONTEXT_ALLOCATION;
        let (channel, input, session) = handshake.agree(&disk.name, context).await?;
        let connection = Connection::new(channel.clone(), input, session);
        Ok::<_, vellum::Error>((channel, connection))
    };
    match connected.await {
        Ok(joined) => Some(joined),
        Err(error) => {
            setup.fail(Failure::error(FailureKind::Request, "join", &error));
            None
        }
    }
}

/// Something about the whole disk, or much of it.
fn draw(setup: &Setup) -> Request {
    setup.draw(|rng| {
        let command = *rng.pick(&[
            proto::CMD_CACHE,
            proto::CMD_CACHE,
            proto::CMD_BLOCK_STATUS,
            proto::CMD_WRITE_ZEROES,
            proto::CMD_TRIM,
            proto::CMD_READ,
        ]);
        let from = if rng.chance(1, 2) {
            0
        } else {
            rng.below(1 << 12) << 28
        };
        let (len_bytes, buffers) = match command {
            proto::CMD_READ => {
                let len = 512 * rng.between(1, 16 << 10);
                (len, Buffers::from_iter([Buffer::zeroed(len as usize)]))
            }
            _ => ((GREEDY_SIZE_BYTES - from) >> rng.below(4), Buffers::new()),
        };
        let flags = match command {
            proto::CMD_WRITE_ZEROES if rng.chance(1, 2) => proto::CMD_FLAG_NO_HOLE,
            _ => 0,
        };
        Request {
            command,
            flags,
            offset_bytes: from.min(GREEDY_SIZE_BYTES - len_bytes),
            len_bytes,
            buffers,
        }
    })
}

fn export_of(setup: &Setup, disk: &GuestDisk) -> Option<Arc<Export>> {
    setup.daemon.parts.try_lock()?.exports()?.find(&disk.name)
}

/// Expects that soon only so many clients are connected.
async fn expect_few(setup: &Setup, export: &Export, most: usize) {
    let begun = lane::now();
    while export.connections() > most {
        if lane::now().duration_since(begun) > SOON {
            let message = "what a client asked for goes on after it has left";
            return setup.fail(Failure::new(FailureKind::Stuck, message));
        }
        lane::sleep(LOOK).await;
    }
}

/// Removes the export under its clients.
async fn remove(setup: &Setup, disk: &GuestDisk) {
    let delete = |mode| json!({"id": disk.name, "mode": mode});
    if setup.draw(|rng| rng.chance(1, 3)) {
        let asked = setup.ask("block-export-del", delete("safe"));
        if let Some(Ok(_)) = soon(setup, "block-export-del, refused", asked).await {
            return;
        }
    }
    let asked = setup.demand("block-export-del", delete("hard"));
    soon(setup, "block-export-del", asked).await;
}

/// What ends soon; a failure if it does not.
pub(super) async fn soon<T>(setup: &Setup, what: &str, work: impl Future<Output = T>) -> Option<T> {
    let limit = lane::sleep(SOON);
    match select(std::pin::pin!(work), std::pin::pin!(limit)).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(_) => {
            let message = format!("{what} has to wait for what clients asked for");
            setup.fail(Failure::new(FailureKind::Stuck, message));
            None
        }
    }
}
