//! A store of objects in memory, whose requests are done in any order, and get lost, come late, or twice.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures_channel::oneshot;
use parking_lot::Mutex;
use vellum_io::{Error, ErrorKind, Io, Result};
use vellum_repository::{ObjectInfo, Objects};

/// What is asked for.
#[derive(Debug, Clone)]
enum Asked {
    Get(String, Option<Range<u64>>),
    Put(String, Vec<u8>),
    PutNew(String, Vec<u8>),
    List(String),
    Remove(String),
}

/// What is answered.
#[derive(Debug, Clone)]
enum Answer {
    Content(Vec<u8>),
    New(bool),
    Listed(Vec<ObjectInfo>),
    Done,
}

struct Pending {
    client: usize,
    asked: Asked,
    /// `None`: nobody listens any more.
    reply: Option<oneshot::Sender<Result<Answer>>>,
}

/// What there is: content and time of change.
type Content = BTreeMap<String, (Vec<u8>, u64)>;

/// The store, as all clients share it.
#[derive(Default)]
pub struct Store {
    content: Content,
    clock: u64,
    pending: Vec<Pending>,
    /// Faults so far.
    pub faults: u64,
    /// What is to be new takes the place of what is there.
    pub ignores_conditions: bool,
}

/// A client's way to the store.
#[derive(Clone)]
pub struct Client {
    store: Arc<Mutex<Store>>,
    number: usize,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "client {}", self.number)
    }
}

fn failed(message: &str) -> Error {
    Error::new(ErrorKind::Io, "ask the store", message)
}

impl Store {
    /// The content alone, which does not change any more.
    pub fn copy(&self) -> Store {
        Store {
            content: self.content.clone(),
            clock: self.clock,
            ..Store::default()
        }
    }

    /// How many requests wait for an answer, or will still have their effect.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Does any of the requests, maybe with a fault: one of `fault_every`, 0 for none. Says whether
    /// something has changed that a manifest may lead to.
    pub fn step(&mut self, random: &mut fastrand::Rng, fault_every: u32) -> bool {
        let mut at = random.usize(..self.pending.len());
        // Every third client is slow, so that others come and go while it works.
        for _ in 0..6 {
            if self.pending[at].client.is_multiple_of(3) {
                at = random.usize(..self.pending.len());
            }
        }
        let Pending {
            client,
            asked,
            reply,
        } = self.pending.swap_remove(at);
        let again = |store: &mut Store| {
            store.pending.push(Pending {
                client,
                asked: asked.clone(),
                reply: None,
            });
        };
        self.clock += 1;
        let fault = match fault_every {
            0 => 0,
            every if random.u32(..every) == 0 => random.u32(1..=5),
            _ => 0,
        };
        self.faults += u64::from(fault != 0 && reply.is_some());
        let answer = match fault {
            // It never comes to the store.
            1 => Err(failed("lost")),
            // The answer does not come back.
            2 => {
                let _ = self.perform(&asked);
                Err(failed("answer lost"))
            }
            // It comes later, or never.
            3 => {
                if random.u32(..4) > 0 {
                    again(self);
                }
                Err(failed("late"))
            }
            // It comes again later.
            4 => {
                let answer = self.perform(&asked);
                again(self);
                answer
            }
            // The answer is lost, and it is tried again at once.
            5 => {
                let _ = self.perform(&asked);
                self.perform(&asked)
            }
            _ => self.perform(&asked),
        };
        if let Some(reply) = reply {
            let _ = reply.send(answer);
        }
        match &asked {
            Asked::Remove(key) | Asked::Put(key, _) | Asked::PutNew(key, _) => {
                !key.starts_with("sessions/") && !key.starts_with("locks/")
            }
            _ => false,
        }
    }

    /// Whether somebody wants to make an object whose key begins so.
    pub fn is_asked_to_make(&self, prefix: &str) -> bool {
        let makes = |pending: &Pending| match &pending.asked {
            Asked::Put(key, _) | Asked::PutNew(key, _) => key.starts_with(prefix),
            _ => false,
        };
        self.pending.iter().any(makes)
    }

    /// Does the oldest request of a client, as asked.
    pub fn step_of(&mut self, client: usize) -> bool {
        let at = self
            .pending
            .iter()
            .position(|pending| pending.client == client);
        let Some(at) = at else { return false };
        let Pending { asked, reply, .. } = self.pending.remove(at);
        self.clock += 1;
        let answer = self.perform(&asked);
        if let Some(reply) = reply {
            let _ = reply.send(answer);
        }
        true
    }

    /// What a client has asked for never comes to the store.
    pub fn forget(&mut self, client: usize) {
        self.pending.retain(|pending| pending.client != client);
    }

    /// Changes all objects whose keys begin so, one at least; `false`: it is removed.
    pub fn damage(&mut self, prefix: &str, change: impl Fn(&mut Vec<u8>) -> bool) {
        assert!(self.has(prefix), "there is no {prefix}");
        self.content
            .retain(|key, (content, _)| !key.starts_with(prefix) || change(content));
    }

    /// Whether there is an object whose key begins so.
    pub fn has(&self, prefix: &str) -> bool {
        self.content.keys().any(|key| key.starts_with(prefix))
    }

    /// Time passes.
    pub fn pass(&mut self, seconds: u64) {
        self.clock += seconds;
    }

    /// A client is gone. What it has asked for may still come to the store.
    pub fn kill(&mut self, client: usize, random: &mut fastrand::Rng) {
        let of_client = |pending: &Pending| pending.client == client && pending.reply.is_some();
        self.pending
            .retain(|pending| !of_client(pending) || random.u32(..2) == 0);
        for pending in self.pending.iter_mut().filter(|pending| of_client(pending)) {
            pending.reply = None;
        }
    }

    fn perform(&mut self, asked: &Asked) -> Result<Answer> {
        let now = self.clock;
        Ok(match asked {
            Asked::Get(key, range) => {
                let not_found = || Error::new(ErrorKind::NotFound, "read", key.clone());
                let (content, _) = self.content.get(key).ok_or_else(not_found)?;
                Answer::Content(match range {
                    None => content.clone(),
                    Some(range) => {
                        let range = range.start as usize..range.end as usize;
                        let part = content.get(range);
                        part.ok_or_else(|| failed("a range beyond the end"))?
                            .to_vec()
                    }
                })
            }
            Asked::Put(key, content) => {
                self.content.insert(key.clone(), (content.clone(), now));
                Answer::Done
            }
            Asked::PutNew(key, content) => {
                let is_new = self.ignores_conditions || !self.content.contains_key(key);
                if is_new {
                    self.content.insert(key.clone(), (content.clone(), now));
                }
                Answer::New(is_new)
            }
            Asked::List(prefix) => {
                let below = self
                    .content
                    .iter()
                    .filter(|(key, _)| key.starts_with(prefix));
                let info = below.map(|(key, (content, changed))| ObjectInfo {
                    key: key.clone(),
                    len_bytes: content.len() as u64,
                    changed_seconds: *changed,
                });
                Answer::Listed(info.collect())
            }
            Asked::Remove(key) => {
                self.content.remove(key);
                Answer::Done
            }
        })
    }
}

impl Client {
    pub fn new(store: &Arc<Mutex<Store>>, number: usize) -> Self {
        Client {
            store: store.clone(),
            number,
        }
    }

    fn ask<T: 'static>(&self, asked: Asked, take: fn(Answer) -> Option<T>) -> Io<T> {
        let (reply, answer) = oneshot::channel();
        self.store.lock().pending.push(Pending {
            client: self.number,
            asked,
            reply: Some(reply),
        });
        Io::boxed(async move {
            let answer = answer.await.unwrap_or_else(|_| Err(failed("no answer")))?;
            take(answer).ok_or_else(|| failed("another answer"))
        })
    }
}

impl Objects for Client {
    fn name(&self) -> &str {
        "store"
    }

    fn get(&self, key: &str, _limit_bytes: u64) -> Io<Vec<u8>> {
        self.ask(Asked::Get(key.to_owned(), None), content)
    }

    fn get_range(&self, key: &str, range: Range<u64>) -> Io<Vec<u8>> {
        self.ask(Asked::Get(key.to_owned(), Some(range)), content)
    }

    fn put(&self, key: &str, content: Vec<u8>) -> Io<()> {
        self.ask(Asked::Put(key.to_owned(), content), |_| Some(()))
    }

    fn put_new(&self, key: &str, content: Vec<u8>) -> Io<bool> {
        self.ask(
            Asked::PutNew(key.to_owned(), content),
            |answer| match answer {
                Answer::New(is_new) => Some(is_new),
                _ => None,
            },
        )
    }

    fn list(&self, prefix: &str) -> Io<Vec<ObjectInfo>> {
        self.ask(Asked::List(prefix.to_owned()), |answer| match answer {
            Answer::Listed(listed) => Some(listed),
            _ => None,
        })
    }

    fn remove(&self, key: &str) -> Io<()> {
        self.ask(Asked::Remove(key.to_owned()), |_| Some(()))
    }
}

fn content(answer: Answer) -> Option<Vec<u8>> {
    match answer {
        Answer::Content(content) => Some(content),
        _ => None,
    }
}
