//! The rules of `blkdebug`: which events change the state, arm errors or hold
//! their request. Plain state; nothing here waits.

use std::sync::Arc;

use crate::event::Event;

/// Kinds of requests that an error may strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A write of zeroes.
    WriteZeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
    /// A question about the status of a range.
    BlockStatus,
}

impl RequestKind {
    /// The kind of a name as `iotype` takes it.
    pub fn parse(name: &str) -> Option<RequestKind> {
        Some(match name {
            "read" => RequestKind::Read,
            "write" => RequestKind::Write,
            "write-zeroes" => RequestKind::WriteZeroes,
            "discard" => RequestKind::Discard,
            "flush" => RequestKind::Flush,
            "block-status" => RequestKind::BlockStatus,
            _ => return None,
        })
    }
}

/// An error to strike requests with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// The error number; 0 strikes nobody, but disarms others.
    pub errno: i32,
    /// The kind of request; `None` means all but questions about block status.
    pub kind: Option<RequestKind>,
    /// The request must touch this sector (of 512 bytes).
    pub sector: Option<u64>,
    /// Strike once only.
    pub once: bool,
    /// Fail without giving others a turn first.
    pub immediately: bool,
}

/// What a rule does when its event comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Arms an error; what earlier events have armed is disarmed.
    Inject(Injection),
    /// Goes to another state once all rules of the event were looked at.
    SetState(i32),
    /// Holds the request under a tag until it is resumed.
    Suspend(Arc<str>),
}

/// What is to happen at an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// When.
    pub event: Event,
    /// Only in this state; 0 means in any.
    pub state: i32,
    /// What.
    pub action: Action,
}

/// One error that strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InjectedError {
    pub(super) errno: i32,
    pub(super) immediately: bool,
}

/// All rules, the state they are in, and the errors that are armed.
#[derive(Debug)]
pub(super) struct Rules {
    state: i32,
    next_id: u64,
    /// The last one added comes first.
    rules: Vec<(u64, Rule)>,
    /// The last one armed comes first.
    armed: Vec<(u64, Injection)>,
}

impl Rules {
    pub(super) fn new(rules: Vec<Rule>) -> Self {
        let mut all = Rules {
            state: 1,
            next_id: 0,
            rules: Vec::new(),
            armed: Vec::new(),
        };
        rules.into_iter().for_each(|rule| all.add(rule));
        all
    }

    pub(super) fn add(&mut self, rule: Rule) {
        self.rules.insert(0, (self.next_id, rule));
        self.next_id += 1;
    }

    /// Takes all breakpoints of a tag away; says whether there were any.
    pub(super) fn remove_breakpoints(&mut self, tag: &str) -> bool {
        let before = self.rules.len();
        self.rules
            .retain(|(_, rule)| !matches!(&rule.action, Action::Suspend(found) if **found == *tag));
        self.rules.len() != before
    }

    /// Plays an event; the result are the tags under which the request is held.
    pub(super) fn play(&mut self, event: Event) -> Vec<Arc<str>> {
        let mut new_state = self.state;
        let mut armed = Vec::new();
        let mut tags = Vec::new();
        let mut spent = Vec::new();
        for (id, rule) in &self.rules {
            if rule.event != event || (rule.state != 0 && rule.state != self.state) {
                continue;
            }
            match &rule.action {
                Action::Inject(injection) => armed.insert(0, (*id, injection.clone())),
                Action::SetState(state) => new_state = *state,
                Action::Suspend(tag) => {
                    tags.push(tag.clone());
                    spent.push(*id);
                }
            }
        }
        if !armed.is_empty() {
            self.armed = armed;
        }
        self.rules.retain(|(id, _)| !spent.contains(id));
        self.state = new_state;
        tags
    }

    /// The error that strikes a request.
    pub(super) fn matching_error(
        &mut self,
        kind: RequestKind,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Option<InjectedError> {
        let at = self.armed.iter().position(|(_, injection)| {
            let is_kind = match injection.kind {
                None => kind != RequestKind::BlockStatus,
                Some(only) => only == kind,
            };
            let touches = injection.sector.is_none_or(|sector| {
                let byte = sector.saturating_mul(512);
                offset_bytes <= byte && byte - offset_bytes < len_bytes
            });
            is_kind && touches
        })?;
        let (id, injection) = &self.armed[at];
        let strike = InjectedError {
            errno: injection.errno,
            immediately: injection.immediately,
        };
        if strike.errno == 0 {
            return None;
        }
        if injection.once {
            let id = *id;
            self.armed.remove(at);
            self.rules.retain(|(other, _)| *other != id);
        }
        Some(strike)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inject(event: Event, state: i32, errno: i32, once: bool) -> Rule {
        Rule {
            event,
            state,
            action: Action::Inject(Injection {
                errno,
                kind: None,
                sector: None,
                once,
                immediately: false,
            }),
        }
    }

    fn errno(rules: &mut Rules, kind: RequestKind) -> Option<i32> {
        rules
            .matching_error(kind, 0, 512)
            .map(|strike| strike.errno)
    }

    #[test]
    fn an_error_strikes_after_its_event_and_once_if_asked() {
        let mut rules = Rules::new(vec![inject(Event::L2Load, 0, 5, true)]);
        assert_eq!(errno(&mut rules, RequestKind::Read), None);
        rules.play(Event::L2Update);
        assert_eq!(errno(&mut rules, RequestKind::Read), None);
        rules.play(Event::L2Load);
        assert_eq!(errno(&mut rules, RequestKind::BlockStatus), None);
        assert_eq!(errno(&mut rules, RequestKind::Read), Some(5));
        rules.play(Event::L2Load);
        assert_eq!(errno(&mut rules, RequestKind::Read), None);
    }

    #[test]
    fn states_follow_events_and_another_event_rearms() {
        let mut rules = Rules::new(vec![
            Rule {
                event: Event::WriteAio,
                state: 1,
                action: Action::SetState(2),
            },
            inject(Event::WriteAio, 2, 28, false),
            inject(Event::FlushToDisk, 0, 5, false),
        ]);
        rules.play(Event::WriteAio);
        assert_eq!(errno(&mut rules, RequestKind::Write), None);
        rules.play(Event::WriteAio);
        assert_eq!(errno(&mut rules, RequestKind::Write), Some(28));
        assert_eq!(errno(&mut rules, RequestKind::Write), Some(28));
        rules.play(Event::FlushToDisk);
        assert_eq!(errno(&mut rules, RequestKind::Flush), Some(5));
    }

    #[test]
    fn sectors_and_kinds_choose() {
        let mut rule = inject(Event::None, 0, 5, false);
        let Action::Inject(injection) = &mut rule.action else {
            panic!()
        };
        injection.sector = Some(3);
        injection.kind = Some(RequestKind::BlockStatus);
        let mut rules = Rules::new(vec![rule]);
        rules.play(Event::None);
        let status = RequestKind::BlockStatus;
        assert!(rules.matching_error(status, 1536, 1).is_some());
        assert!(rules.matching_error(status, 0, 2048).is_some());
        assert!(rules.matching_error(status, 0, 1536).is_none());
        assert!(rules.matching_error(status, 1537, 512).is_none());
        assert!(rules.matching_error(status, 1536, 0).is_none());
        assert!(rules.matching_error(RequestKind::Read, 0, 2048).is_none());
    }

    #[test]
    fn a_breakpoint_holds_one_request() {
        let mut rules = Rules::new(Vec::new());
        let suspend = |tag: &str| Rule {
            event: Event::Pwritev,
            state: 0,
            action: Action::Suspend(tag.into()),
        };
        rules.add(suspend("a"));
        rules.add(suspend("b"));
        assert!(rules.remove_breakpoints("b"));
        assert!(!rules.remove_breakpoints("b"));
        assert_eq!(rules.play(Event::Pwritev), ["a".into()]);
        assert!(rules.play(Event::Pwritev).is_empty());
    }
}
