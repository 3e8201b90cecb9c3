//! Files that were cut off: what is missing is told, also once the file has grown again.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, CutShort, Fix, check, cut_short, repair};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_io::lane::block_on;
use vellum_storage::{MemStorage, Storage};

const CLUSTER: usize = 4096;
const CLUSTERS: usize = 600;

async fn empty_image(options: CreateOptions) -> Arc<MemStorage> {
    let storage = Arc::new(MemStorage::new());
    let options = options
        .size_bytes((CLUSTERS * CLUSTER) as u64)
        .cluster_size_bytes(CLUSTER as u64 as _);
    create(storage.clone(), None, &options).await.expect("room");
    storage
}

/// An image in which every cluster was written, or so many bytes of its file.
async fn image(len_bytes: Option<usize>) -> Arc<MemStorage> {
    let storage = empty_image(CreateOptions::default()).await;
    let opened = open(storage.clone()).await;
    write(&opened, 0, CLUSTERS).await;
    opened.close().await.expect("a close");
    let mut bytes = storage.snapshot();
    bytes.truncate(len_bytes.unwrap_or(bytes.len()));
    Arc::new(MemStorage::with_bytes(bytes))
}

async fn open(storage: Arc<MemStorage>) -> Arc<Qcow2> {
    let opened = Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default()).await;
    opened.expect("an image that can be opened")
}

async fn write(image: &Qcow2, cluster: usize, clusters: usize) {
    let buffer = Buffer::copy_of(&vec![7; clusters * CLUSTER]);
    let at = (cluster * CLUSTER) as u64;
    let written = image.write(at, buffer, RequestFlags::default()).await;
    written.expect("room");
}

async fn corruptions(storage: &Arc<MemStorage>) -> u64 {
    let report = check(storage.clone(), &CheckOptions::default()).await;
    report.expect("an image that can be checked").corruptions
}

#[test]
fn a_whole_file_misses_nothing() {
    block_on(async {
        let whole = image(None).await;
        assert_eq!(cut_short(whole.clone()).await.expect("reads"), None);
        open(whole.clone()).await.close().await.expect("a close");
        assert_eq!(corruptions(&whole).await, 0);
    });
}

#[test]
fn what_is_missing_is_counted() {
    block_on(async {
        let whole = image(None).await.len_bytes().expect("a length") as usize;
        let cut = image(Some(whole - 80 * CLUSTER - 1)).await;
        let found = cut_short(cut).await.expect("reads").expect("a gap");
        // The cluster of which one byte is missing is there.
        assert_eq!(found.missing_bytes, 80 * CLUSTER as u64);
        assert_eq!(found.missing_tables, 0);
        let tables = CLUSTERS.div_ceil(CLUSTER / 8);
        let referenced = (CLUSTERS + tables) * CLUSTER;
        assert_eq!(found.referenced_bytes, referenced as u64);
        let words = "the file is cut short: 327680 of";
        assert!(found.to_string().starts_with(words), "{found}");
        // What a table maps that is missing itself, nobody knows.
        let cut = image(Some(whole - 100 * CLUSTER)).await;
        let found = cut_short(cut).await.expect("reads").expect("a gap");
        assert_eq!(found.missing_tables, 1);
        let words = "the file is cut short: at least 49152 of";
        assert!(found.to_string().starts_with(words), "{found}");
    });
}

/// A write makes the file as long as it was; a check tells of what is lost until a repair accepts it.
#[test]
fn a_file_that_has_grown_again_is_still_known_to_be_cut() {
    block_on(async {
        let whole = image(None).await.len_bytes().expect("a length") as usize;
        let cut = image(Some(whole / 3)).await;
        assert!(corruptions(&cut).await > 0);
        let opened = open(cut.clone()).await;
        write(&opened, CLUSTERS - 1, 1).await;
        opened.close().await.expect("a close");
        let grown = cut.len_bytes().expect("a length") as usize;
        assert!(grown >= whole, "{grown} of {whole}");
        let none: Option<CutShort> = None;
        assert_eq!(cut_short(cut.clone()).await.expect("reads"), none);
        assert_eq!(corruptions(&cut).await, 1);
        let options = CheckOptions::default();
        let repaired = repair(cut.clone(), Fix::All, &options).await;
        assert_eq!(repaired.expect("a repair").corruptions_fixed, 1);
        assert_eq!(corruptions(&cut).await, 0);
    });
}

/// The repair of a dirty image at an open makes the file longer, and does not accept the zeroes.
#[test]
fn a_dirty_image_that_is_repaired_at_an_open_is_still_known_to_be_cut() {
    block_on(async {
        let storage = empty_image(CreateOptions::default().lazy_refcounts(true)).await;
        let opened = open(storage.clone()).await;
        write(&opened, 0, CLUSTERS).await;
        opened.flush().await.expect("a flush");
        let mut whole = storage.snapshot();
        // As a program leaves it that was killed before it wrote refcounts: the last blocks of them count nothing.
        let table = u64::from_be_bytes(whole[48..56].try_into().expect("8 bytes")) as usize;
        let block =
            u64::from_be_bytes(whole[table..table + 8].try_into().expect("8 bytes")) as usize;
        whole[block + 2 * CLUSTERS / 3..block + CLUSTER].fill(0);
        let cut = Arc::new(MemStorage::with_bytes(whole[..whole.len() / 3].to_vec()));
        for _ in 0..2 {
            let reopened = open(cut.clone()).await;
            reopened.close().await.expect("a close");
            let report = check(cut.clone(), &CheckOptions::default()).await;
            assert!(report.expect("a check").corruptions > 0);
        }
        let reopened = open(cut.clone()).await;
        write(&reopened, CLUSTERS - 1, 1).await;
        reopened.close().await.expect("a close");
        assert_eq!(corruptions(&cut).await, 1, "it has grown again");
        let report = repair(cut.clone(), Fix::All, &CheckOptions::default()).await;
        assert!(report.expect("a repair").corruptions_fixed > 0);
        assert_eq!(corruptions(&cut).await, 0);
    });
}

/// Wherever the file ends, data that is lost is told of.
#[test]
fn tables_and_compressed_clusters_that_are_cut_are_told() {
    block_on(async {
        let storage = empty_image(CreateOptions::default()).await;
        let opened = open(storage.clone()).await;
        let mut random = fastrand::Rng::with_seed(5);
        let mut data = vec![0; CLUSTER];
        data[..CLUSTER / 2].fill_with(|| random.u8(..));
        let written = opened
            .write_compressed(0, Buffer::copy_of(&data), RequestFlags::default())
            .await;
        written.expect("room");
        opened.close().await.expect("a close");
        let whole = storage.snapshot();
        let missing = async |len_bytes: usize| {
            let cut = Arc::new(MemStorage::with_bytes(whole[..len_bytes].to_vec()));
            cut_short(cut).await.expect("reads")
        };
        assert_eq!(missing(whole.len()).await, None);
        // Half of the last cluster holds what it was packed into.
        let found = missing(whole.len() - 3000).await.expect("no end");
        assert!(found.missing_bytes < 1536, "{found:?}");
        let l1 = u64::from_be_bytes(whole[40..48].try_into().expect("8 bytes"));
        let found = missing(l1 as usize).await.expect("no L1 table");
        assert_eq!(found.missing_tables, 1);
    });
}
