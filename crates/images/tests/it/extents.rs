//! Which files a check opens beside the image.

use std::sync::Arc;

use vellum::{ErrorKind, Storage};
use vellum_graph::foreign::{Fix, check};
use vellum_graph::node::file_policy::FilePolicy;
use vellum_images::create;

#[test]
fn a_check_opens_only_extents_that_the_policy_allows() {
    let directory = tempfile::tempdir().unwrap();
    let name = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let mut settings = create::settings(&name("disk.vmdk"), "vmdk").unwrap();
    settings.set("size", "1048576").unwrap();
    settings.set("subformat", "twoGbMaxExtentSparse").unwrap();
    vellum_io::lane::block_on(async {
        let made = create::make(&name("disk.vmdk"), "vmdk", &settings).await;
        made.unwrap();
        let file: Arc<dyn Storage> =
            vellum_storage::FileStorage::open(name("disk.vmdk"), &Default::default()).unwrap();
        let within = FilePolicy::Within(directory.path().to_owned());
        for policy in [FilePolicy::Any, within] {
            let found = check("vmdk", &file, Fix::default(), &policy).await;
            assert_eq!(found.unwrap().unwrap().corruptions, 0);
        }
        let elsewhere = FilePolicy::Within(directory.path().join("elsewhere"));
        for policy in [FilePolicy::Nothing, elsewhere] {
            let refused = check("vmdk", &file, Fix::default(), &policy).await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Denied);
        }
    });
}
