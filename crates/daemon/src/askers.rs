//! [`Askers`]: who waits for what a command does, so that what may take for ever is given up once nobody
//! does.
//!
//! A command does not know its client. Whoever carries it out says whom it is for
//! ([`Askers::carry_out_for`]), and what the command awaits finds that.

use std::cell::RefCell;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum_export::nbd::Stop;
use vellum_io::lane;

/// So long goes on what a client that has gone has asked for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whose command is carried out at this moment: what it is requested of is there when the client has gone.
#[derive(Debug, Default)]
pub(super) struct Askers(RefCell<Option<Stop>>);

impl Askers {
    /// Carries a command out for a client, who has gone when `gone` is requested.
    pub(super) async fn carry_out_for<T>(
        &self,
        gone: &Stop,
        command: impl Future<Output = T>,
    ) -> T {
        let mut command = pin!(command);
        poll_fn(|context| {
            let outer = self.0.replace(Some(gone.clone()));
            let polled = command.as_mut().poll(context);
            self.0.replace(outer);
            polled
        })
        .await
    }

    /// What `work` of a command gives; `None` if its client has gone for some time. The work may be dropped
    /// anywhere.
    pub(super) async fn or_give_up<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let gone = self.0.borrow().clone();
        let patience = async {
            match gone {
                Some(gone) => gone.wait().await,
                None => pending().await,
            }
            lane::sleep(PATIENCE).await;
        };
        match select(pin!(work), pin!(patience)).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn what_nobody_waits_for_is_given_up() {
        lane::block_on(async {
            let askers = Askers::default();
            let (gone, there) = (Stop::new(), Stop::new());
            let for_ever = || askers.or_give_up(pending::<()>());
            let left = pin!(askers.carry_out_for(&gone, for_ever()));
            let waited_for = pin!(askers.carry_out_for(&there, for_ever()));
            gone.request();
            let given_up = select(left, waited_for).await;
            assert!(matches!(given_up, Either::Left((None, _))));
            // Nobody in particular has asked for this.
            assert_eq!(for_ever().now_or_never(), None);
        });
    }
}
