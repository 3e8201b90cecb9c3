//! The daemon's side: commands are carried out, and moments told, on the lane of the monitors.
//!
//! Invariants:
//! - A command that has begun goes on to its end, whether or not somebody still waits for the answer, unless
//!   it waits for a server itself ([`Askers`](crate::askers::Askers)).
//! - What only looks ends with whoever has asked: anybody may ask for that, and nothing is kept of those who
//!   ask and go while others hold the daemon.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt;
use futures_util::future::{Either, LocalBoxFuture, select};
use futures_util::stream::FuturesUnordered;
use serde_json::{Map, Value};
use vellum_export::nbd::Stop;
use vellum_io::lane;

use crate::commands;
use crate::daemon::Daemon;
use crate::effect::Effect;
use crate::qmp::{Arguments, Written};

use super::moment::Moment;

/// So long may commands take that have not ended when the daemon has.
const FAREWELL: Duration = Duration::from_secs(1);

/// What is asked of the daemon.
#[derive(Debug)]
pub(super) enum Question {
    /// To carry a command out.
    Command {
        name: String,
        arguments: Map<String, Value>,
        answer: oneshot::Sender<Written>,
    },
    /// How it is.
    Look(oneshot::Sender<Moment>),
}

/// Answers questions until the daemon has ended, or nobody can ask any more.
pub(super) async fn attend(daemon: Rc<Daemon>, mut questions: mpsc::UnboundedReceiver<Question>) {
    let mut running: FuturesUnordered<LocalBoxFuture<'static, ()>> = FuturesUnordered::new();
    loop {
        // Without any it would say at once that there are none.
        if running.is_empty() {
            running.push(Box::pin(std::future::pending()));
        }
        let ended = daemon.ended.clone();
        let asked_or_done = select(questions.next(), running.next());
        let Either::Left((event, _)) = select(asked_or_done, pin!(ended.wait())).await else {
            break;
        };
        match event {
            Either::Left((Some(Question::Look(answer)), _)) => {
                // Whoever has asked may be gone.
                let _ = answer.send(Moment::now(&daemon));
            }
            Either::Left((
                Some(Question::Command {
                    name,
                    arguments,
                    answer,
                }),
                _,
            )) => {
                let daemon = daemon.clone();
                let arguments = Arguments::new(arguments);
                running.push(Box::pin(carry_out(daemon, name, arguments, answer)));
            }
            Either::Left((None, _)) => break,
            Either::Right(_) => {}
        }
    }
    finish(running).await;
}

/// Carries a command out for somebody who may go meanwhile.
async fn carry_out(
    daemon: Rc<Daemon>,
    name: String,
    arguments: Arguments,
    mut answer: oneshot::Sender<Written>,
) {
    let gone = Stop::new();
    let command = commands::write_out(&daemon, &name, arguments);
    let command = pin!(daemon.askers.carry_out_for(&gone, command));
    let outcome = match select(command, answer.cancellation()).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) if commands::effect(&name) == Some(Effect::Nothing) => return,
        Either::Right(((), command)) => {
            gone.request();
            command.await
        }
    };
    // Whoever has asked may be gone.
    let _ = answer.send(outcome);
}

/// Waits for what runs; the one that never ends is among them.
async fn finish(mut running: FuturesUnordered<LocalBoxFuture<'static, ()>>) {
    let last = async {
        while running.len() > 1 {
            running.next().await;
        }
    };
    select(pin!(last), pin!(lane::sleep(FAREWELL))).await;
}
