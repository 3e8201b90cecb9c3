//! What files say, and what is wrong with them.

use std::path::Path;

use super::*;

fn parse(text: &str) -> Result<Config, Mistake> {
    Config::parse(text, Path::new("/etc/vellum/disks.toml"))
}

fn requests(text: &str) -> Vec<String> {
    let config = parse(text).unwrap_or_else(|mistake| panic!("{mistake}"));
    let steps = plan(&Parts::default(), &config.parts);
    let line = |step: &Step| step.place.expect("it stands there").line;
    let told = |step: &Step| format!("{}: {}", line(step), step.request);
    steps.iter().map(told).collect()
}

/// Every key there is.
const FULL: &str = r#"
[daemon]
monitors = ["/run/qmp.sock", "own.sock"]
on-error = "report"
nbd = { path = "nbd.sock", max-connections = 0 }

[throttle.slow]
iops-total = 500
bps-write = "10M"

[[secret]]
name = "key"
file = "key.txt"
format = "base64"

[[disk]]
name = "top"
image = "top.qcow2"
format = "qcow2"
cache = "none"
discard = "unmap"
throttle = "slow"
options = { backing = "base", encrypt = { format = "luks", key-secret = "key" } }

[[disk.export]]
type = "nbd"
name = "disk"
writable = true

[[disk.export]]
type = "vhost-user-blk"
id = "guest"
addr.path = "guest.sock"
num-queues = 2

[[disk]]
name = "base"
image = "nbd://host/base"
format = "raw"
read-only = true
"#;

#[test]
fn a_file_is_the_requests_that_a_client_would_send() {
    let found = requests(FULL);
    let expected = [
        r#"12: {"execute":"object-add","arguments":{"qom-type":"secret","id":"key","file":"/etc/vellum/key.txt","format":"base64"}}"#,
        r#"7: {"execute":"object-add","arguments":{"qom-type":"throttle-group","id":"slow","limits":{"iops-total":500,"bps-write":10485760}}}"#,
        r#"5: {"execute":"nbd-server-start","arguments":{"addr":{"type":"unix","data":{"path":"/etc/vellum/nbd.sock"}},"max-connections":0}}"#,
        r#"37: {"execute":"blockdev-add","arguments":{"driver":"raw","node-name":"base","read-only":true,"file":{"driver":"nbd","export":"base","server":{"host":"host","port":"10809","type":"inet"}}}}"#,
        r#"17: {"execute":"blockdev-add","arguments":{"driver":"throttle","node-name":"top","cache":{"direct":true,"no-flush":false},"discard":"unmap","throttle-group":"slow","file":{"driver":"qcow2","node-name":"top-image","cache":{"direct":true,"no-flush":false},"discard":"unmap","file":{"filename":"/etc/vellum/top.qcow2","driver":"file"},"backing":"base","encrypt":{"format":"luks","key-secret":"key"}}}}"#,
        r#"30: {"execute":"block-export-add","arguments":{"type":"vhost-user-blk","id":"guest","node-name":"top","addr":{"path":"/etc/vellum/guest.sock","type":"unix"},"num-queues":2}}"#,
        r#"25: {"execute":"block-export-add","arguments":{"type":"nbd","id":"top-nbd","node-name":"top","writable":true,"name":"disk"}}"#,
    ];
    assert_eq!(found, expected);
    let config = parse(FULL).expect("it is right");
    let paths: Vec<&str> = config
        .monitors
        .iter()
        .map(|one| one.path.as_str())
        .collect();
    assert_eq!(paths, ["/run/qmp.sock", "/etc/vellum/own.sock"]);
    assert_eq!(config.on_error, OnError::Report);
    let http = "[daemon]\nmetrics = ['unix:http.sock,token-secret=t', '127.0.0.1:9100']";
    let metrics = parse(http).expect("it is right").metrics;
    let addresses: Vec<&str> = metrics.iter().map(|one| &*one.address).collect();
    let expected = [
        "unix:/etc/vellum/http.sock,token-secret=t",
        "127.0.0.1:9100",
    ];
    assert_eq!(addresses, expected);
}

#[test]
fn mistakes_are_told_with_their_place_and_what_was_meant() {
    let disk = |more: &str| format!("[[disk]]\nname = 'a'\nimage = 'a'\nformat = 'raw'\n{more}");
    let export = |more: &str| disk(&format!("[[disk.export]]\n{more}"));
    let cases = [
        ("[demon]".into(), "1:2: the file has no key 'demon'; did you mean 'daemon'?"),
        ("a = ".into(), "1:5: "),
        ("[daemon]\nmonitors = 3".into(), "2:12: 'monitors' of [daemon] is a list of texts, not integer"),
        ("[daemon]\nmonitor = []".into(), "2:1: [daemon] has no key 'monitor'; did you mean 'monitors'?"),
        ("[daemon]\nnbd = {}".into(), "2:1: the NBD server listens on 'path', a unix socket, or on 'host' and 'port'"),
        ("[daemon]\nnbd = { prot = 1 }".into(), "2:1: the NBD server listens on"),
        ("[throttle.t]\niops-totl = 1".into(), "2:1: [throttle.t] has no key 'iops-totl'; did you mean 'iops-total'?"),
        ("[throttle.t]\niops-total = 'x'".into(), "2:14: 'iops-total' is a number, or a text like \"100M\""),
        ("[[secret]]\nname = 'k'\ndata = 'geheim'".into(), "3:1: a secret is given by 'file'"),
        (disk("nam = 1"), "5:1: disk 'a' has no key 'nam'; did you mean 'name'?"),
        (disk("cache = 'non'"), "5:9: 'cache' of disk 'a' is one of writeback, none, unsafe, not 'non'; did you mean 'none'?"),
        (disk("throttle = 'x'"), "2:8: there is no [throttle.x]"),
        (disk("options = { detect-zeros = 'on' }"), "5:13: nodes of driver 'raw' have no option 'detect-zeros'; did you mean 'detect-zeroes'?"),
        (disk("options = { detect-zeroes = 'x' }"), "3:9: disk 'a': Parameter 'detect-zeroes' does not accept value 'x'"),
        (disk("options = { node-name = 'x' }"), "5:13: 'options.node-name' is said outside of the options already"),
        (disk("options = { driver = 'raw' }"), "4:10: 'format' and 'options.driver' say the same"),
        (disk("[[disk]]\nname = 'a'\nimage = 'b'\nformat = 'raw'"), "6:8: disk 'a' is in line 2 already"),
        ("[[disk]]\nname = 'a'\nimage = 'a'".into(), "1:1: 'format' is missing in disk 'a'"),
        ("[[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow'\n".into(), ""),
        ("[[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcwo2'\n".into(), "4:10: there is no format 'qcwo2'; did you mean 'qcow2'?"),
        ("[[disk]]\nname = '0'".into(), "2:8: a name begins with a letter"),
        ("[[disk]]\nname = 'a'\nformat = 'raw'".into(), "1:1: 'image' is missing in disk 'a'"),
        (export("type = 'nbd'"), "5:1: an export of type nbd needs a server"),
        (export(""), "5:1: 'type' is missing in an export of disk 'a'"),
        (export("type = 'nbd'\nwriteable = true"), "7:1: an export of type nbd has no key 'writeable'; did you mean 'writable'?"),
        (export("type = 'fuse'"), "5:1: export 'a-fuse': Parameter 'mountpoint' is missing"),
        (export("type = 'fuse'\nmountpoint = 'm'\nwritable = 'on'"), "5:1: export 'a-fuse': Invalid parameter type for 'writable', expected: boolean"),
        (
            "[[disk]]\nname='a'\noptions = {driver='raw',file='b'}\n[[disk]]\nname='b'\noptions={driver='raw',file='a'}".into(),
            "2:6: disk 'a' stands on itself",
        ),
    ];
    for (text, expected) in cases {
        let text: String = text;
        match parse(&text) {
            Ok(_) => assert_eq!(expected, "", "{text}"),
            Err(mistake) => {
                let expected = format!("/etc/vellum/disks.toml:{expected}");
                let told = mistake.to_string();
                assert!(
                    told.starts_with(&expected),
                    "{text}\nsays {told}\nnot {expected}"
                );
            }
        }
    }
}

#[test]
fn devices_are_opened_as_devices() {
    let image = |path: &str| {
        let text = format!("[[disk]]\nname='a'\nformat='raw'\nimage='{path}'");
        requests(&text).remove(0)
    };
    assert!(image("/dev/sdb").contains(r#""driver":"host_device""#));
    assert!(image("/dev/shm/a").contains(r#""driver":"file""#));
    assert!(image("sub/a").contains(r#""filename":"/etc/vellum/sub/a""#));
}

#[test]
fn any_text_is_a_configuration_or_a_mistake_with_a_place() {
    let mut random = fastrand::Rng::with_seed(21);
    let bits = [
        "[", "]", "{", "}", "=", "'", "\n", "[[disk]]", "name", "3", "true", ".", "\u{e4}",
    ];
    for _ in 0..3000 {
        let mut text = FULL.to_owned();
        for _ in 0..random.usize(1..4) {
            let from = random.usize(..text.len());
            let to = (from + random.usize(..12)).min(text.len());
            if text.is_char_boundary(from) && text.is_char_boundary(to) {
                text.replace_range(from..to, bits[random.usize(..bits.len())]);
            }
        }
        match parse(&text) {
            Ok(config) => drop(plan(&Parts::default(), &config.parts)),
            Err(mistake) => {
                let place = mistake.place.expect("it is in the text");
                assert!(
                    place.line <= 2 + text.matches('\n').count(),
                    "{text}\n{mistake}"
                );
            }
        }
    }
}
