//! `quorum`: several nodes that hold the same, of which so many must agree.

use std::collections::BTreeSet;

use vellum::Result;
use vellum::nodes::{Quorum, QuorumChild, QuorumOptions, QuorumReport, ReadPattern};
use vellum_options::Options;

use crate::live::child_access::ChildAccess;
use crate::live::notices::NodeNotice;
use crate::live::uses::Changes;
use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    is_reopened: false,
    ..DriverFacts::named("quorum")
};

const DRIVER: &str = "quorum";

fn take_read_pattern(options: &mut Options) -> Result<ReadPattern> {
    match options.take_text("read-pattern")?.as_deref() {
        None | Some("quorum") => Ok(ReadPattern::Quorum),
        Some("fifo") => Ok(ReadPattern::Fifo),
        Some(other) => Err(invalid(format!(
            "Parameter 'read-pattern' does not accept value '{other}'"
        ))),
    }
}

/// The numbers of the children. Only one that is opened anew may have lost some in between.
fn numbers_of_children(options: &Options, has_gaps: bool) -> Result<BTreeSet<usize>> {
    let number = |key: &str| {
        let rest = key.strip_prefix("children.")?;
        rest.split('.').next()?.parse::<usize>().ok()
    };
    let numbers: BTreeSet<usize> = options.keys().filter_map(number).collect();
    if numbers.is_empty() {
        return Err(invalid("Parameter 'children' is missing"));
    }
    match numbers
        .iter()
        .zip(0..)
        .find(|(found, wanted)| **found != *wanted)
    {
        Some((_, wanted)) if !has_gaps => {
            Err(invalid(format!("Parameter 'children.{wanted}' missing")))
        }
        _ => Ok(numbers),
    }
}

/// The options, but for the children.
fn take(options: &mut Options, count: usize) -> Result<QuorumOptions> {
    let threshold = options.take_number("vote-threshold")?;
    let threshold = threshold.ok_or_else(|| invalid("Parameter 'vote-threshold' is missing"))?;
    let blkverify = options.take_bool("blkverify")?.unwrap_or(false);
    let rewrites = options.take_bool("rewrite-corrupted")?.unwrap_or(false);
    let read_pattern = take_read_pattern(options)?;
    if blkverify && (count != 2 || threshold != 2) {
        return Err(invalid(
            "blkverify=on can only be set if there are exactly two files and vote-threshold is 2",
        ));
    }
    if blkverify && rewrites {
        return Err(invalid(
            "rewrite-corrupted=on cannot be used with blkverify=on",
        ));
    }
    Ok(QuorumOptions {
        threshold: usize::try_from(threshold).unwrap_or(usize::MAX),
        read_pattern,
        rewrites,
    })
}

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let nodes = &around.nodes;
    let numbers = numbers_of_children(&options, around.is_reopened())?;
    let quorum = take(&mut options, numbers.len())?;
    let mut children = Vec::new();
    for number in numbers {
        let key = format!("children.{number}");
        let named = options.get_text(&key).map(str::to_owned);
        let node = child(&mut options, &key, Role::Image, &around).await?;
        let alone = ChildAccess::keeping(Changes::ALL);
        nodes.require(&around.place, &key, alone).await?;
        let device = node.into_device(&around.flags).await?;
        children.push(QuorumChild {
            name: named.unwrap_or_else(|| device.info().name),
            device,
        });
    }
    refuse_unknown(&options, DRIVER)?;
    let notices = around.nodes.notices().clone();
    let node = around.place.parent.clone().unwrap_or_default();
    let tell = move |report: QuorumReport| {
        notices.give(NodeNotice::Quorum {
            node: node.clone(),
            report,
        });
    };
    Ok(OpenedNode::device(
        FACTS,
        Quorum::new(children, quorum, tell)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(usize, usize)> {
        let mut options = Options::parse(text)?;
        let count = numbers_of_children(&options, false)?.len();
        Ok((count, take(&mut options, count)?.threshold))
    }

    #[test]
    fn children_are_counted_and_what_contradicts_itself_is_refused() {
        let good = "vote-threshold=2,children.0=a,children.1.driver=raw,children.1.file=b";
        assert_eq!(parse(good).unwrap(), (2, 2));
        for (text, part) in [
            ("vote-threshold=1", "'children' is missing"),
            ("children.0=a", "'vote-threshold' is missing"),
            (
                "vote-threshold=1,children.0=a,children.2=b",
                "'children.1' missing",
            ),
            ("vote-threshold=1,blkverify=on,children.0=a", "exactly two"),
            (
                "vote-threshold=2,blkverify=on,rewrite-corrupted=on,children.0=a,children.1=b",
                "cannot be used",
            ),
            (
                "vote-threshold=1,read-pattern=x,children.0=a",
                "read-pattern",
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
