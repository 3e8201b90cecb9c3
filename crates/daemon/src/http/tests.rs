//! Requests against a daemon of this process, without sockets: what HTTP says is what QMP says.

use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_graph::Nodes;
use vellum_io::lane::{self, block_on};
use vellum_options::Options;

use crate::qmp::{Arguments, Outcome};
use crate::schema::{of_type, result};
use crate::{Daemon, ServerEnvironment, carry_out};

use super::access::{Access, Way};
use super::desk::attend;
use super::service::Service;
use super::{Request, Response};

/// A daemon with a file of zeroes `f`, a disk `d` on it, and a disk `o`.
struct Place {
    daemon: Rc<Daemon>,
    service: Service,
}

impl Place {
    fn run<F: Future<Output = ()>>(test: impl FnOnce(Rc<Place>) -> F) {
        block_on(async {
            let daemon = Daemon::new(Nodes::live(), ServerEnvironment::without_sockets());
            let (service, questions) = Service::new(daemon.nodes.clone());
            let place = Rc::new(Place {
                daemon: daemon.clone(),
                service,
            });
            for node in [
                "driver=null-co,node-name=f,size=1048576",
                "driver=raw,node-name=d,file=f",
                "driver=null-co,node-name=o,size=4096",
            ] {
                let added = place.add(node).await;
                added.expect(node);
            }
            let tested = pin!(test(place));
            let Either::Left(_) = select(tested, pin!(attend(daemon.clone(), questions))).await
            else {
                panic!("the desk has closed");
            };
            daemon.shut_down().await.expect("all is closed");
        });
    }

    async fn add(&self, node: &str) -> Result<(), crate::Failure> {
        let options = Options::parse(node).expect("options");
        self.daemon.add_node(options).await
    }

    async fn ask(&self, method: &str, target: &str, body: Value) -> Response {
        let request = Request {
            method: method.to_owned(),
            target: target.to_owned(),
            content_type: Some("application/json".to_owned()),
            body: match body.is_null() {
                true => Vec::new(),
                false => body.to_string().into_bytes(),
            },
            ..Request::default()
        };
        let access = Access {
            way: Way::Unix,
            token: None,
        };
        self.service.answer(&request, &access).await
    }

    async fn get(&self, target: &str) -> Value {
        let response = self.ask("GET", target, Value::Null).await;
        assert_eq!(response.status, 200, "{target}");
        serde_json::from_slice(&response.body).expect("JSON")
    }

    async fn qmp(&self, command: &str, arguments: Value) -> Outcome {
        let Value::Object(members) = arguments else {
            panic!("{arguments} are no arguments");
        };
        carry_out(&self.daemon, command, Arguments::new(members)).await
    }
}

fn body(response: &Response) -> Value {
    serde_json::from_slice(&response.body).expect("JSON")
}

#[test]
fn what_http_and_qmp_say_is_the_same() {
    Place::run(|place| async move {
        for (target, command, arguments) in [
            ("/v1/exports", "query-block-exports", json!({})),
            ("/v1/jobs", "query-jobs", json!({})),
            (
                "/v1/nodes",
                "query-named-block-nodes",
                json!({"flat": true}),
            ),
        ] {
            let told = place.qmp(command, arguments.clone()).await.expect(command);
            assert_eq!(place.get(target).await, told, "{target}");
            let asked = place
                .ask("POST", &format!("/v1/qmp/{command}"), arguments)
                .await;
            assert_eq!((asked.status, body(&asked)), (200, told), "{command}");
        }
        for (command, arguments, status) in [
            (
                "block_resize",
                json!({"node-name": "nosuch", "size": 1}),
                404,
            ),
            ("blockdev-del", json!({"node-name": "f"}), 409),
            ("blockdev-del", json!({}), 400),
            ("nosuch", json!({}), 404),
            ("job-pause", json!({"id": "j"}), 404),
            (
                "block-job-set-speed",
                json!({"device": "j", "speed": 1}),
                404,
            ),
            ("block-export-del", json!({"id": "e"}), 404),
            (
                "blockdev-add",
                json!({"driver": "null-co", "node-name": "f"}),
                409,
            ),
        ] {
            let failure = place
                .qmp(command, arguments.clone())
                .await
                .expect_err(command);
            let target = format!("/v1/qmp/{command}");
            let refused = place.ask("POST", &target, arguments).await;
            let told = body(&refused);
            assert_eq!(refused.status, status, "{command}: {told}");
            assert_eq!(told["detail"], failure.text);
            assert_eq!(told["class"], failure.class.name());
            assert_eq!(told["status"], status);
        }
    });
}

#[test]
fn nodes_come_change_and_go() {
    Place::run(|place| async move {
        let new = json!({"driver": "null-co", "node-name": "new", "size": 512});
        assert_eq!(
            place.ask("POST", "/v1/nodes", new.clone()).await.status,
            200
        );
        assert_eq!(place.ask("POST", "/v1/nodes", new).await.status, 409);
        let flushed = place.ask("POST", "/v1/disks/d/flush", Value::Null).await;
        assert_eq!(flushed.status, 200, "{:?}", body(&flushed));
        let sized = place
            .ask("POST", "/v1/disks/new/resize", json!({"size": "x"}))
            .await;
        assert_eq!(sized.status, 400);
        assert_eq!(place.get("/v1/disks/new").await["size-bytes"], 512);
        assert_eq!(
            place
                .ask("DELETE", "/v1/nodes/new", Value::Null)
                .await
                .status,
            200
        );
        assert_eq!(
            place
                .ask("DELETE", "/v1/nodes/new", Value::Null)
                .await
                .status,
            404
        );
        assert_eq!(
            place.ask("GET", "/v1/disks/new", Value::Null).await.status,
            404
        );
    });
}

#[test]
fn disks_are_roots_of_the_graph_and_views_are_what_they_are_declared_as() {
    Place::run(|place| async move {
        let disks = place.get("/v1/disks").await;
        let names: Vec<&Value> = disks
            .as_array()
            .unwrap()
            .iter()
            .map(|disk| &disk["node-name"])
            .collect();
        assert_eq!(names, ["d", "o"]);
        assert_eq!(disks[0], place.get("/v1/disks/d").await);
        assert_eq!(disks[0]["size-bytes"], 1 << 20);
        assert_eq!(disks[0]["layers"][0]["node-name"], "d");
        assert_eq!(
            place.ask("GET", "/v1/disks/f", Value::Null).await.status,
            404
        );
        let document = place.get("/openapi.json").await;
        for (target, schema) in [
            ("/v1/disks", of_type("[Disk]")),
            ("/v1/disks/d", of_type("Disk")),
            ("/v1/host", of_type("Host")),
            ("/v1/stats", of_type("Stats")),
            ("/v1/nodes", result("query-named-block-nodes")),
        ] {
            check(&place.get(target).await, &schema, &document, target);
        }
        let problem = body(&place.ask("GET", "/v1/disks/f", Value::Null).await);
        check(&problem, &of_type("Problem"), &document, "a problem");
    });
}

/// A value is what a schema says: all that our own schemas say of values is looked at.
fn check(value: &Value, schema: &Value, document: &Value, place: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let found = document.pointer(reference.trim_start_matches('#'));
        return check(value, found.expect(reference), document, place);
    }
    match schema["type"].as_str() {
        Some("array") => {
            for (at, item) in value.as_array().expect(place).iter().enumerate() {
                check(item, &schema["items"], document, &format!("{place}[{at}]"));
            }
        }
        Some("object") => {
            let members = value.as_object().expect(place);
            for name in schema["required"].as_array().into_iter().flatten() {
                assert!(
                    members.contains_key(name.as_str().unwrap()),
                    "{place} lacks {name}"
                );
            }
            if schema.get("allOf").is_some() {
                return;
            }
            for (name, member) in members {
                let known = schema["properties"].get(name);
                let known = known.unwrap_or_else(|| panic!("{place} has {name}"));
                check(member, known, document, &format!("{place}.{name}"));
            }
        }
        Some("integer") => assert!(value.is_u64() || value.is_i64(), "{place}: {value}"),
        Some("number") => assert!(value.is_number(), "{place}: {value}"),
        Some("boolean") => assert!(value.is_boolean(), "{place}: {value}"),
        Some("string") => {
            let text = value.as_str().unwrap_or_else(|| panic!("{place}: {value}"));
            if let Some(values) = schema["enum"].as_array() {
                assert!(values.iter().any(|known| known == text), "{place}: {text}");
            }
        }
        _ => {}
    }
}

#[test]
fn metrics_tell_of_every_disk() {
    Place::run(|place| async move {
        let response = place.ask("GET", "/metrics", Value::Null).await;
        assert_eq!(response.status, 200);
        let text = String::from_utf8(response.body).unwrap();
        for line in [
            "vellum_disks 2",
            "vellum_nodes 3",
            "vellum_node_size_bytes{node=\"d\",driver=\"raw\"} 1048576",
        ] {
            assert!(
                text.lines().any(|one| one == line),
                "{line} is not in\n{text}"
            );
        }
    });
}

#[test]
fn the_page_asks_nobody_else() {
    Place::run(|place| async move {
        let response = place.ask("GET", "/", Value::Null).await;
        assert_eq!(response.status, 200);
        let header = |wanted: &str| {
            let mut headers = response.headers.iter();
            headers
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| value.as_str())
        };
        let policy = header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none';"), "{policy}");
        assert!(header("access-control-allow-origin").is_none());
        let page = String::from_utf8(response.body).unwrap();
        for elsewhere in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!page.contains(elsewhere), "{elsewhere}");
        }
    });
}

#[test]
fn what_nobody_waits_for_is_not_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("quiet");
    let _silent = UnixListener::bind(&path).expect("a free path");
    Place::run(|place| async move {
        let server = json!({"type": "unix", "path": path});
        let node = json!({"driver": "nbd", "node-name": "n", "server": server});
        {
            let asked = pin!(place.ask("POST", "/v1/nodes", node));
            let a_while = pin!(lane::sleep(Duration::from_millis(200)));
            let asked = select(asked, a_while).await;
            assert!(matches!(asked, Either::Right(_)), "it is silent");
        }
        let add = || place.add("driver=null-co,node-name=n");
        assert!(add().await.is_err(), "the name is kept");
        while add().await.is_err() {
            lane::sleep(Duration::from_millis(200)).await;
        }
    });
}

/// Whoever holds the daemon may do so for as long as a server likes.
#[test]
fn nothing_is_kept_of_those_who_look_and_go() {
    Place::run(|place| async move {
        let held = place.daemon.parts.lock().await;
        let before = Rc::strong_count(&place.daemon);
        for target in ["/v1/exports", "/v1/disks/d/space", "/v1/nodes"] {
            let asked = pin!(place.ask("GET", target, Value::Null));
            let a_while = pin!(lane::sleep(Duration::from_millis(50)));
            drop(select(asked, a_while).await);
        }
        lane::sleep(Duration::from_millis(50)).await;
        assert_eq!(Rc::strong_count(&place.daemon), before);
        drop(held);
        assert_eq!(place.get("/v1/exports").await, json!([]));
    });
}

#[test]
fn who_asks_at_the_end_is_told_so() {
    block_on(async {
        let daemon = Daemon::new(Nodes::live(), ServerEnvironment::without_sockets());
        let (service, questions) = Service::new(daemon.nodes.clone());
        let place = Place {
            daemon: daemon.clone(),
            service,
        };
        daemon.shut_down().await.expect("nothing is open");
        attend(daemon, questions).await;
        let response = place.ask("GET", "/v1/disks", Value::Null).await;
        assert_eq!(response.status, 503);
    });
}
