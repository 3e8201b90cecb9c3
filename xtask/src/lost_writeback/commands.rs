//! Commands that end: one that succeeds has made its result durable.

use anyhow::{Context, Result, ensure};

use super::Place;

/// A command, what is needed before it, and the proof of what it has done.
struct Scenario {
    name: &'static str,
    before: &'static str,
    command: &'static str,
    proof: &'static str,
}

const COPY_CHAIN: &str = "cp $S/disk $S/top $L";
const COPY_REPOSITORY: &str = "cp -r $S/repository $L";
const SERVE_WITHOUT_RANGES: &str = "cd $S; python3 -c 'import http.server as h
s = h.ThreadingHTTPServer((\"127.0.0.1\", 0), h.SimpleHTTPRequestHandler)
print(s.server_port, flush=True); s.serve_forever()' >$S/port 2>/dev/null & server=$!
trap 'kill $server' EXIT; while ! grep -q . $S/port; do sleep 0.05; done; URL=http://127.0.0.1:$(cat $S/port)
";

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "convert-raw",
        before: "",
        command: "$V convert -q -t writeback -O raw $S/disk $L/out",
        proof: "$V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "convert-qcow2",
        before: "",
        command: "$V convert -q -t writeback -O qcow2 $S/disk $L/out",
        proof: "$V check -q $L/out; $V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "convert-compressed",
        before: "",
        command: "$V convert -q -c -t writeback -O qcow2 $S/disk $L/out",
        proof: "$V check -q $L/out; $V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "checksums",
        before: "$V create -q -f qcow2 $L/out 8M",
        command: "$V convert -q -n -t writeback --target-image-opts $S/disk driver=qcow2,file.filename=$L/out,checksums=on",
        proof: "$V check -q $L/out; $V compare -q $S/raw $L/out
                $V scrub -q --image-opts driver=qcow2,file.filename=$L/out,checksums=on",
    },
    Scenario {
        name: "convert-vhdx",
        before: "",
        command: "$V convert -q -t writeback -O vhdx $S/disk $L/out",
        proof: "$V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "convert-vmdk",
        before: "",
        command: "$V convert -q -t writeback -O vmdk $S/disk $L/out",
        proof: "$V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "journal",
        before: "timeout -s KILL 0.05 $V convert -q --journal -t writeback -O qcow2 $S/disk $L/out || true",
        command: "$V convert -q --journal -t writeback -O qcow2 $S/disk $L/out",
        proof: "$V check -q $L/out; $V compare -q $S/raw $L/out",
    },
    // The server's answers are kept in a file below TMPDIR while they are read.
    Scenario {
        name: "spool",
        before: "",
        command: "TMPDIR=$L $V convert -q -f qcow2 -O raw $URL/disk $S/out",
        proof: "$V compare -q -f raw -F raw $S/raw $S/out",
    },
    Scenario {
        name: "cache",
        before: "mkdir -m 700 $L/cache",
        command: "c='json:{\"driver\":\"raw\",\"file\":{\"driver\":\"cache\",\"directory\":\"'$L'/cache\",\"version\":\"1\",\
                  \"file\":{\"driver\":\"file\",\"filename\":\"'$S'/raw\"}}}'
                  $V convert -q -O raw \"$c\" $S/out; $V convert -q -O raw \"$c\" $S/again",
        proof: "cmp $S/raw $S/out; cmp $S/raw $S/again
                c='json:{\"driver\":\"raw\",\"file\":{\"driver\":\"cache\",\"directory\":\"'$L'/cache\",\"version\":\"1\",\
                \"file\":{\"driver\":\"file\",\"filename\":\"'$S'/raw\"}}}'
                $V convert -q -O raw \"$c\" $S/out; cmp $S/raw $S/out",
    },
    Scenario {
        name: "push",
        before: COPY_REPOSITORY,
        command: "$V push -q $S/top $L/repository:top",
        proof: "rm -f $S/out; $V repo verify --read-data $L/repository
                $V pull -q $L/repository:top $S/out; $V compare -q $S/changed $S/out",
    },
    Scenario {
        name: "pull",
        before: "",
        command: "$V pull -q $S/repository:disk $L/out",
        proof: "$V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "receive",
        before: "",
        command: "$V receive -q $L/out <$S/stream",
        proof: "$V compare -q $S/raw $L/out",
    },
    Scenario {
        name: "send",
        before: "",
        command: "$V send -q -o $L/out $S/disk",
        proof: "rm -f $S/out; $V receive -q $S/out <$L/out; $V compare -q $S/raw $S/out",
    },
    Scenario {
        name: "commit",
        before: COPY_CHAIN,
        command: "$V commit -q -b $L/disk $L/top",
        proof: "$V check -q $L/disk; $V compare -q $S/changed $L/disk",
    },
    Scenario {
        name: "rebase",
        before: COPY_CHAIN,
        command: "$V rebase -q -b $S/raw -F raw $L/top",
        proof: "$V check -q $L/top; $V compare -q $S/changed $L/top",
    },
    Scenario {
        name: "snapshot",
        before: COPY_CHAIN,
        command: "$V snapshot -c one $L/disk",
        proof: "$V check -q $L/disk; $V compare -q $S/raw $L/disk; $V snapshot -l $L/disk | grep -q one",
    },
    Scenario {
        name: "compact",
        before: "cp $S/disk $L; $V io -f qcow2 -c 'discard -q 0 1M' -c 'write -q -P 9 0 1M' $L/disk
                 $V convert -q -O raw $L/disk $S/expected",
        command: "$V compact -q $L/disk",
        proof: "$V check -q $L/disk; $V compare -q $S/expected $L/disk",
    },
    Scenario {
        name: "seal",
        before: COPY_CHAIN,
        command: "$V seal -q $L/disk",
        proof: "$V verify -q $L/disk; $V compare -q $S/raw $L/disk",
    },
    Scenario {
        name: "resize",
        before: COPY_CHAIN,
        command: "$V resize -q $L/disk 12M",
        proof: "$V check -q $L/disk; $V resize -q --shrink $L/disk 8M; $V compare -q $S/raw $L/disk",
    },
    Scenario {
        name: "repair",
        before: "$V create -q -f qcow2 -o lazy_refcounts=on $L/disk 8M
                 timeout -s KILL 2 $V io -f qcow2 -c 'write -q -P 3 0 3M' -c flush -c 'sleep 60000' $L/disk || true",
        command: "$V check -q -r all $L/disk",
        proof: "$V check -q $L/disk; $V io -r -f qcow2 -c 'read -q -P 3 0 3M' $L/disk",
    },
];

/// Their names.
pub fn names() -> impl Iterator<Item = &'static str> {
    SCENARIOS.iter().map(|scenario| scenario.name)
}

/// Plays one; returns whether its command succeeded.
pub fn play(name: &str, place: &mut Place) -> Result<bool> {
    let found = SCENARIOS.iter().find(|scenario| scenario.name == name);
    let scenario = found.context("there is such a scenario")?;
    place.proves(scenario.before)?;
    place.sync()?;
    place.begin_losing();
    let served = match scenario.command.contains("$URL") {
        true => SERVE_WITHOUT_RANGES,
        false => "",
    };
    let ended = place.shell(&format!("{served}{}", scenario.command))?;
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(!said.contains("panicked"), "{said}");
    place.mounted.remount()?;
    if !ended.status.success() {
        ensure!(ended.status.code() == Some(1), "{}: {said}", ended.status);
        // A command that fails for another reason proves nothing; FUSE may end a sync with EINTR.
        let reasons = [
            "Input/output error",
            "errno 5",
            "hash",
            "Interrupted system call",
        ];
        let is_expected = reasons.iter().any(|reason| said.contains(reason));
        ensure!(is_expected, "it fails for another reason: {said}");
        return Ok(false);
    }
    place.proves(scenario.proof)?;
    Ok(true)
}
