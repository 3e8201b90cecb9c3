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
use vellum_nbd::client::{Connection, Question};
use vellum_nbd::request::RequestHeader;
use vellum_nbd::{Channel, proto};

use super::monitor::{self, pause};
use super::scene::{GuestDisk, Scene};
use super::sessions::{self, PORT};
use crate::failure::{Failure, FailureKind};

/// How long the disk is in bytes.
pub(super) const SIZE_BYTES: u64 = 1 << 40;
/// How long anything that must end soon may take. Every turn and every step takes
/// [`MOMENT`], so this is also how many of them there may be.
const SOON: Duration = Duration::from_secs(2);
/// What a turn or a step takes.
pub(super) const MOMENT: Duration = Duration::from_micros(500);
/// How often a client is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// How a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Farewell {
    /// It closes its socket.
    Closes,
    /// It says that it sends nothing more, and receives no more.
    HalfCloses,
    /// The network forgets all connections.
    Reset,
    /// It stays, and receives nothing.
    Deaf,
}

/// Plays the whole story: clients come, ask, and leave; the export goes, or the daemon ends.
pub(super) async fn tell(scene: Rc<Scene>, clients: u64) {
    let disk = scene.disks[0].clone();
    let name = disk.new_name("n");
    if !sessions::serve(&scene).await || !monitor::add_image(&scene, &disk, &name, None).await {
        return;
    }
    let rounds = scene.draw(|rng| rng.between(1, 3));
    for _ in 0..rounds {
        monitor::export(&scene, &disk, &name).await;
        if scene.failure().is_some() {
            return;
        }
        write_some(&scene, &disk).await;
        let staying = let_clients_be(&scene, &disk, clients).await;
        disk.device.replace(None);
        if scene.failure().is_some() || scene.draw(|rng| rng.chance(1, 4)) {
            break;
        }
        remove(&scene, &disk).await;
        drop(staying);
        if scene.failure().is_some() {
            return;
        }
    }
    // As the daemon does at its end, before it closes its nodes, which may take longer.
    let ended = scene.demand("nbd-server-stop", json!({}));
    soon(&scene, "the end of the server", ended).await;
    if scene.failure().is_none()
        && let Err(error) = scene.daemon.shut_down().await
    {
        scene.fail(Failure::error(FailureKind::Request, "the end", &error));
    }
}

/// Puts something on the disk here and there.
async fn write_some(scene: &Scene, disk: &GuestDisk) {
    let Some(device) = disk.device.borrow().clone() else {
        return;
    };
    for _ in 0..scene.draw(|rng| rng.below(8)) {
        let mut offset = scene.draw(|rng| rng.below(SIZE_BYTES >> 16) << 16);
        if scene.draw(|rng| rng.chance(1, 2)) {
            offset %= 64 << 20;
        }
        let data = Buffer::zeroed(scene.draw(|rng| 512 * rng.between(1, 256)) as usize);
        if let Err(error) = device.write(offset, data, Default::default()).await {
            scene.fail(Failure::error(FailureKind::Request, "write", &error));
        }
    }
}

/// Has clients come, ask, and leave; gives those that stay, who receive nothing.
async fn let_clients_be(scene: &Rc<Scene>, disk: &GuestDisk, clients: u64) -> Vec<Channel> {
    let mut staying = Vec::new();
    for _ in 0..clients {
        let Some(export) = export_of(scene, disk) else {
            return staying;
        };
        let before = export.connections();
        let Some((channel, connection)) = join(scene, disk).await else {
            return staying;
        };
        let farewells = [
            Farewell::Closes,
            Farewell::HalfCloses,
            Farewell::Reset,
            Farewell::Deaf,
            Farewell::Deaf,
        ];
        let farewell = scene.draw(|rng| *rng.pick(&farewells));
        scene.note(format!("a client: {farewell:?}"));
        for number in 0..scene.draw(|rng| rng.between(1, 5)) {
            let question = draw(scene);
            scene.note(format!("asks: {question:?}"));
            ask(scene, &channel, &connection, question, farewell, number);
        }
        pause(scene).await;
        lane::sleep(Duration::from_millis(scene.draw(|rng| rng.below(100)))).await;
        // None of these fails: see the network.
        match farewell {
            Farewell::Closes => drop(channel.shutdown(Shutdown::Both)),
            Farewell::HalfCloses => drop(channel.shutdown(Shutdown::Write)),
            Farewell::Reset => {
                staying.clear();
                if let Some(network) = &scene.network {
                    network.reset(PORT, true);
                }
                expect_few(scene, &export, 0).await;
            }
            Farewell::Deaf => staying.push(channel),
        }
        if matches!(farewell, Farewell::Closes | Farewell::HalfCloses) {
            expect_few(scene, &export, before).await;
        }
    }
    staying
}

/// Asks without waiting for the answer.
fn ask(
    scene: &Scene,
    channel: &Channel,
    connection: &Arc<Connection>,
    question: Question,
    farewell: Farewell,
    number: u64,
) {
    if farewell != Farewell::Deaf {
        let connection = connection.clone();
        let asked = async move { drop(connection.ask(question).await) };
        return drop(scene.lanes.any().spawn(asked));
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
    drop(scene.lanes.own().spawn(sent));
}

async fn join(scene: &Scene, disk: &GuestDisk) -> Option<(Channel, Arc<Connection>)> {
    let network = scene.network.as_ref()?;
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
            scene.fail(Failure::error(FailureKind::Request, "join", &error));
            None
        }
    }
}

/// Something about the whole disk, or much of it.
fn draw(scene: &Scene) -> Question {
    scene.draw(|rng| {
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
            _ => ((SIZE_BYTES - from) >> rng.below(4), Buffers::new()),
        };
        let flags = match command {
            proto::CMD_WRITE_ZEROES if rng.chance(1, 2) => proto::CMD_FLAG_NO_HOLE,
            _ => 0,
        };
        Question {
            command,
            flags,
            offset_bytes: from.min(SIZE_BYTES - len_bytes),
            len_bytes,
            buffers,
        }
    })
}

fn export_of(scene: &Scene, disk: &GuestDisk) -> Option<Arc<Export>> {
    scene.daemon.parts.try_lock()?.exports()?.find(&disk.name)
}

/// Expects that soon only so many clients are connected.
async fn expect_few(scene: &Scene, export: &Export, most: usize) {
    let begun = lane::now();
    while export.connections() > most {
        if lane::now().duration_since(begun) > SOON {
            let message = "what a client asked for goes on after it has left";
            return scene.fail(Failure::new(FailureKind::Stuck, message));
        }
        lane::sleep(LOOK).await;
    }
}

/// Removes the export under its clients.
async fn remove(scene: &Scene, disk: &GuestDisk) {
    let delete = |mode| json!({"id": disk.name, "mode": mode});
    if scene.draw(|rng| rng.chance(1, 3)) {
        let asked = scene.ask("block-export-del", delete("safe"));
        if let Some(Ok(_)) = soon(scene, "block-export-del, refused", asked).await {
            return;
        }
    }
    let asked = scene.demand("block-export-del", delete("hard"));
    soon(scene, "block-export-del", asked).await;
}

/// What ends soon; a failure if it does not.
pub(super) async fn soon<T>(scene: &Scene, what: &str, work: impl Future<Output = T>) -> Option<T> {
    let limit = lane::sleep(SOON);
    match select(std::pin::pin!(work), std::pin::pin!(limit)).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(_) => {
            let message = format!("{what} has to wait for what clients asked for");
            scene.fail(Failure::new(FailureKind::Stuck, message));
            None
        }
    }
}
