//! Nodes do not come to stand on themselves, whatever filters and formats are in between.

use vellum_options::Options;

use super::*;

async fn add(place: &Place, text: &str) {
    let options = Options::parse(text).unwrap();
    place.world.nodes.add(options).await.expect(text);
}

/// Refuses a job on `device` with that target, of which nothing is left then.
async fn refuse(place: &Place, command: &str, (device, target): (&str, &str)) -> String {
    let arguments = json!({"job-id": "j", "device": device, "target": target, "sync": "full"});
    let refused = place.ask(command, arguments).await.expect_err(target);
    assert_eq!(place.must("query-jobs", json!({})).await, json!([]));
    assert!(!place.world.is_watched(device));
    refused
}

#[test]
fn an_overlay_whose_file_lies_on_the_node_is_refused() {
    block_on(async {
        let place = Place::new().await;
        place.world.add_image_as_raw("r").await;
        add(&place, "driver=copy-on-read,node-name=flt,file=r").await;
        add(&place, "driver=qcow2,node-name=ov,file=flt").await;
        let names = json!({"node": "r", "overlay": "ov"});
        let refused = place.ask("blockdev-snapshot", names).await.unwrap_err();
        let expected = "Making 'r' a backing child of 'ov' would create a cycle";
        assert_eq!(refused, expected);
        for name in ["ov", "flt", "r"] {
            place.must("blockdev-del", json!({"node-name": name})).await;
        }
        place.check_end(&["top", "mid", "base"]).await;
    });
}

#[test]
fn a_job_does_not_copy_a_node_onto_what_stands_on_it() {
    block_on(async {
        let place = Place::new().await;
        add(&place, "driver=copy-on-read,node-name=flt,file=top").await;
        add(&place, "driver=raw,node-name=raw,file=copy").await;
        for (command, source, target) in [
            ("blockdev-mirror", "top", "flt"),
            ("blockdev-mirror", "flt", "top"),
            ("blockdev-mirror", "copy", "raw"),
            ("blockdev-mirror", "raw", "copy"),
            ("blockdev-backup", "top", "flt"),
            ("blockdev-backup", "copy", "raw"),
            ("blockdev-backup", "raw", "copy"),
        ] {
            let refused = refuse(&place, command, (source, target)).await;
            let is_right = refused.contains("cannot be the target of a copy");
            assert!(is_right, "{command} {source} {target}: {refused}");
        }
        // By its backing file, below a filter.
        place.world.add_overlay("over", "flt").await;
        let refused = refuse(&place, "blockdev-mirror", ("top", "over")).await;
        assert!(
            refused.contains("cannot be the target of a copy"),
            "{refused}"
        );
        for name in ["over", "raw", "flt"] {
            place.must("blockdev-del", json!({"node-name": name})).await;
        }
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// QEMU refuses a backing file that is named as the target; below a filter it is one as well.
#[test]
fn a_backing_file_below_a_filter_is_no_target() {
    block_on(async {
        let place = Place::new().await;
        add(&place, "driver=copy-on-read,node-name=flt,file=copy").await;
        place.world.add_overlay("over", "flt").await;
        for command in ["blockdev-mirror", "blockdev-backup"] {
            let refused = refuse(&place, command, ("top", "copy")).await;
            let expected = "Node 'copy' is busy: node is used as backing hd of 'over'";
            assert_eq!(refused, expected);
        }
        for name in ["over", "flt"] {
            place.must("blockdev-del", json!({"node-name": name})).await;
        }
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// A target that stands on the source by its backing file only is that of a fleecing backup.
#[test]
fn a_backup_to_an_overlay_of_its_source_begins() {
    block_on(async {
        let place = Place::new().await;
        place.world.add_overlay("over", "top").await;
        let backup = json!({"job-id": "b", "device": "top", "target": "over", "sync": "none"});
        let refused = place.ask("blockdev-backup", backup).await;
        assert_eq!(refused.map(drop), Ok(()));
        place.must("job-cancel", json!({"id": "b"})).await;
        place.told.wait(&ENDED).await;
        place
            .must("blockdev-del", json!({"node-name": "over"}))
            .await;
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// Another disk would show what is committed, and not know of it.
#[test]
fn nothing_is_committed_into_what_another_image_in_use_stands_on_below_a_filter() {
    block_on(async {
        let place = Place::new().await;
        add(&place, "driver=raw,node-name=flt,file=mid,read-only=on").await;
        place.world.add_overlay("other", "flt").await;
        let joined = place.world.join("other");
        for base in ["mid", "base"] {
            let commit = json!({"job-id": "j", "device": "top", "base-node": base});
            let refused = place.ask("block-commit", commit).await.unwrap_err();
            let expected = "Node 'mid' is busy: node is used as backing hd of 'other'";
            assert_eq!(refused, expected);
        }
        place.world.nodes.leave(joined.id);
        for name in ["other", "flt"] {
            place.must("blockdev-del", json!({"node-name": name})).await;
        }
        place.check_end(&["top", "mid", "base"]).await;
    });
}
