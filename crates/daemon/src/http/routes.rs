//! [`ROUTES`]: all that can be asked for over HTTP, a row each. The router, the OpenAPI document and
//! the tests read this table and nothing else: a row more is a route more.
//!
//! A path names arguments in braces. A command gets them under the names that the row says, what is in
//! the body (of `POST`) or in the query (of the others), and the row's own where a request leaves
//! these out.

/// A method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// Asks.
    Get,
    /// Changes.
    Post,
    /// Removes.
    Delete,
}

impl Method {
    /// As it stands in a request.
    pub fn name(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Post => "POST",
            Method::Delete => "DELETE",
        }
    }
}

/// What is told that no QMP command tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// All disks.
    Disks,
    /// One disk, that of the argument `node`.
    Disk,
    /// The machine and the program.
    Host,
    /// What changes from second to second, in short.
    Stats,
}

impl View {
    /// The type of what it tells, in `rest.txt`.
    pub fn result(self) -> &'static str {
        match self {
            View::Disks => "[Disk]",
            View::Disk => "Disk",
            View::Host => "Host",
            View::Stats => "Stats",
        }
    }
}

/// Where an argument of a command comes from, or what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The part of the path of this name; a request must not say it again.
    Path(&'static str),
    /// Text where a request says nothing else. Names in braces are those of the path.
    Text(&'static str),
    /// A switch that a request cannot set.
    Switch(bool),
}

/// What a route leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// The page for people.
    Page,
    /// The OpenAPI document.
    Document,
    /// Metrics, for Prometheus.
    Metrics,
    /// A view.
    View(View),
    /// A QMP command, and arguments that it gets.
    Command(&'static str, &'static [(&'static str, Source)]),
    /// The QMP command that the path names.
    AnyCommand,
}

/// A row.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path, with names of arguments in braces.
    pub path: &'static str,
    /// What it leads to.
    pub serves: Serves,
    /// What it is for, in a line.
    pub summary: &'static str,
    /// Arguments of which a request has to say one, though the command would do without.
    pub one_of: &'static [&'static str],
}

const fn get(path: &'static str, serves: Serves, summary: &'static str) -> Route {
    Route {
        method: Method::Get,
        path,
        serves,
        summary,
        one_of: &[],
    }
}

const fn post(
    path: &'static str,
    command: &'static str,
    arguments: &'static [(&'static str, Source)],
    summary: &'static str,
) -> Route {
    let serves = Serves::Command(command, arguments);
    Route {
        method: Method::Post,
        ..get(path, serves, summary)
    }
}

const fn delete(
    path: &'static str,
    command: &'static str,
    arguments: &'static [(&'static str, Source)],
    summary: &'static str,
) -> Route {
    let serves = Serves::Command(command, arguments);
    Route {
        method: Method::Delete,
        ..get(path, serves, summary)
    }
}

const NODE: (&str, Source) = ("node-name", Source::Path("node"));
const DEVICE: (&str, Source) = ("device", Source::Path("node"));
const FULL: (&str, Source) = ("sync", Source::Text("full"));
const JOB: &[(&str, Source)] = &[("id", Source::Path("id"))];

/// Every route.
pub const ROUTES: &[Route] = &[
    get("/", Serves::Page, "The page for people"),
    get("/openapi.json", Serves::Document, "This document"),
    get(
        "/metrics",
        Serves::Metrics,
        "Metrics in Prometheus' text format",
    ),
    get(
        "/v1/disks",
        Serves::View(View::Disks),
        "All disks: nodes that no other one stands on",
    ),
    get("/v1/disks/{node}", Serves::View(View::Disk), "A disk"),
    get(
        "/v1/disks/{node}/space",
        Serves::Command("x-vellum-query-space", &[NODE]),
        "Where the space of a disk goes",
    ),
    get(
        "/v1/chains",
        Serves::Command("x-vellum-query-chain-policies", &[]),
        "What backing chains of disks may be, and how it stands with them",
    ),
    get(
        "/v1/exports",
        Serves::Command("query-block-exports", &[]),
        "All exports",
    ),
    get("/v1/jobs", Serves::Command("query-jobs", &[]), "All jobs"),
    get(
        "/v1/nodes",
        Serves::Command("query-named-block-nodes", &[("flat", Source::Switch(true))]),
        "All nodes",
    ),
    get(
        "/v1/host",
        Serves::View(View::Host),
        "The program, and the file systems below the images",
    ),
    get(
        "/v1/stats",
        Serves::View(View::Stats),
        "What changes from second to second, in short",
    ),
    post(
        "/v1/disks/{node}/snapshot",
        "blockdev-snapshot-sync",
        &[NODE],
        "Put a new overlay on a disk: what it was stays below",
    ),
    post(
        "/v1/disks/{node}/resize",
        "block_resize",
        &[NODE],
        "Resize a disk",
    ),
    post(
        "/v1/disks/{node}/mirror",
        "drive-mirror",
        &[DEVICE, ("job-id", Source::Text("mirror-{node}")), FULL],
        "Copy a disk to a file, and go on with that when the job is completed",
    ),
    post(
        "/v1/disks/{node}/backup",
        "drive-backup",
        &[DEVICE, ("job-id", Source::Text("backup-{node}")), FULL],
        "Copy a disk to a file as it is now",
    ),
    Route {
        // QEMU's command takes the lowest image where none is named: a golden image, say, on which disks
        // of other programs stand.
        one_of: &["base-node", "base"],
        ..post(
            "/v1/disks/{node}/commit",
            "block-commit",
            &[DEVICE, ("job-id", Source::Text("commit-{node}"))],
            "Write the layers of a disk above an image into that image: 'base-node' (or 'base') names it",
        )
    },
    post(
        "/v1/disks/{node}/stream",
        "block-stream",
        &[DEVICE, ("job-id", Source::Text("stream-{node}"))],
        "Copy what lies in layers below into the disk's own image",
    ),
    post(
        "/v1/disks/{node}/compact",
        "x-vellum-compact",
        &[DEVICE, ("job-id", Source::Text("compact-{node}"))],
        "Make the file of a disk as short as what is allocated in it",
    ),
    post(
        "/v1/disks/{node}/chain",
        "x-vellum-set-chain-policy",
        &[NODE],
        "Say what the backing chain of a disk may be; nothing: whatever it is",
    ),
    post(
        "/v1/disks/{node}/flush",
        "x-vellum-flush",
        &[NODE],
        "Make durable what was written to a disk",
    ),
    post("/v1/jobs/{id}/pause", "job-pause", JOB, "Pause a job"),
    post(
        "/v1/jobs/{id}/resume",
        "job-resume",
        JOB,
        "Let a paused job go on",
    ),
    post(
        "/v1/jobs/{id}/complete",
        "job-complete",
        JOB,
        "Complete a job that is ready",
    ),
    post("/v1/jobs/{id}/cancel", "job-cancel", JOB, "Give a job up"),
    post(
        "/v1/jobs/{id}/dismiss",
        "job-dismiss",
        JOB,
        "Forget a job that is over",
    ),
    post(
        "/v1/jobs/{id}/finalize",
        "job-finalize",
        JOB,
        "Put the result of a job in force that waits for that",
    ),
    post(
        "/v1/jobs/{id}/speed",
        "block-job-set-speed",
        &[("device", Source::Path("id"))],
        "Limit the speed of a job",
    ),
    post("/v1/exports", "block-export-add", &[], "Export a node"),
    delete(
        "/v1/exports/{id}",
        "block-export-del",
        &[("id", Source::Path("id"))],
        "End an export",
    ),
    post("/v1/nodes", "blockdev-add", &[], "Open a node"),
    delete("/v1/nodes/{node}", "blockdev-del", &[NODE], "Close a node"),
    Route {
        method: Method::Post,
        path: "/v1/qmp/{command}",
        serves: Serves::AnyCommand,
        summary: "Any QMP command; the body is its arguments",
        one_of: &[],
    },
];

impl Route {
    /// The arguments of a path, if it is this route's: their names and values.
    pub(super) fn matches<'a>(
        &self,
        segments: &'a [String],
    ) -> Option<Vec<(&'static str, &'a str)>> {
        let parts = self.path.split('/').filter(|part| !part.is_empty());
        let parts: Vec<&'static str> = parts.collect();
        if parts.len() != segments.len() {
            return None;
        }
        let mut found = Vec::new();
        for (part, segment) in parts.into_iter().zip(segments) {
            match part
                .strip_prefix('{')
                .and_then(|part| part.strip_suffix('}'))
            {
                Some(name) => found.push((name, segment.as_str())),
                None if part == segment => {}
                None => return None,
            }
        }
        Some(found)
    }

    /// The names of the arguments in its path.
    pub fn parameters(&self) -> impl Iterator<Item = &'static str> {
        let parts = self.path.split('/');
        parts.filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands;

    #[test]
    fn every_route_leads_to_a_command_that_is_there_and_none_twice() {
        for (at, route) in ROUTES.iter().enumerate() {
            let same = |other: &Route| (other.method, other.path) == (route.method, route.path);
            assert!(!ROUTES[at + 1..].iter().any(same), "{}", route.path);
            let Serves::Command(command, arguments) = route.serves else {
                continue;
            };
            assert!(commands::exists(command), "{command}");
            for (_, source) in arguments {
                if let Source::Path(name) = source {
                    assert!(route.parameters().any(|one| one == *name), "{}", route.path);
                }
            }
        }
    }
}
