//! Images whose bytes were changed: whatever they say, there is an answer, and no panic.

use proptest::prelude::*;
use vellum::storage::MemStorage;

use super::*;

const SIZE_BYTES: u64 = 40 << 20;

fn memory(bytes: Vec<u8>) -> Arc<dyn Storage> {
    Arc::new(MemStorage::with_bytes(bytes))
}

/// An image with some data: the file's bytes, and those of its extents.
fn image(subformat: Subformat) -> Vec<Vec<u8>> {
    let options = CreateOptions::default()
        .size_bytes(SIZE_BYTES)
        .subformat(subformat)
        .zeroed_grain(true);
    run(async {
        let count = options.extent_names("a").unwrap().len();
        let files: Vec<_> = (0..=count).map(|_| Arc::new(MemStorage::new())).collect();
        let storages: Vec<Arc<dyn Storage>> = files
            .iter()
            .map(|file| file.clone() as Arc<dyn Storage>)
            .collect();
        create(&storages[0], &storages[1..], &options)
            .await
            .unwrap();
        let descriptor = read_descriptor(&*storages[0]).await.unwrap();
        let extents = storages[1..].to_vec();
        let options = OpenOptions::default();
        let device = open(storages[0].clone(), descriptor, extents, None, &options).await;
        let device = device.unwrap();
        for offset in [0, 65536, 33 << 20] {
            let grain = Buffer::copy_of(&stream_content(offset, 65536));
            let written = device.write(offset, grain, RequestFlags::default());
            written.await.unwrap();
        }
        close(device).await;
        files.iter().map(|file| file.snapshot()).collect()
    })
}

/// Opens, reads, changes and checks; each may fail.
async fn use_image(files: Vec<Vec<u8>>, writable: bool) -> Result<()> {
    let files: Vec<_> = files.into_iter().map(memory).collect();
    let descriptor = read_descriptor(&*files[0]).await?;
    // As many as are asked for, and always the same one.
    let last = files.last().unwrap();
    let extents = vec![last.clone(); descriptor.extents().len()];
    let found = check(files[0].clone(), descriptor.clone(), extents.clone()).await;
    let options = OpenOptions::default()
        .read_only(!writable)
        .tables_bytes(4096);
    let device = open(files[0].clone(), descriptor, extents, None, &options).await?;
    let size_bytes = device.size_bytes();
    for offset in [0, 65536, 1 << 20, 33 << 20, size_bytes.saturating_sub(512)] {
        let _ = device.block_status(offset, 1 << 20, 0).await;
        let read = device.read(offset, Buffer::for_read(70_000)).await;
        if writable && read.is_ok() {
            let bytes = Buffer::zeroed(3000);
            let _ = device
                .write(offset + 700, bytes, RequestFlags::default())
                .await;
            let _ = device
                .write_zeroes(offset, 65536, ZeroRequest::default())
                .await;
            let _ = device.flush().await;
        }
    }
    let _ = (found, device.close().await);
    Ok(())
}

fn images() -> &'static [Vec<Vec<u8>>] {
    static IMAGES: std::sync::OnceLock<Vec<Vec<Vec<u8>>>> = std::sync::OnceLock::new();
    IMAGES.get_or_init(|| {
        let kinds = [
            Subformat::MonolithicSparse,
            Subformat::StreamOptimized,
            Subformat::TwoGbMaxExtentSparse,
        ];
        kinds.into_iter().map(image).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_bytes_give_an_answer(
        which in 0usize..3,
        writable in any::<bool>(),
        // Most of them in header, descriptor and tables, which lie first.
        changes in proptest::collection::vec(
            (prop_oneof![0..80usize, 512..1100usize, 0..11_000usize, 10_752..20_000usize], any::<u8>()), 1..6),
        length in prop_oneof![3 => Just(usize::MAX), 1 => 0usize..70_000],
    ) {
        let mut files = images()[which].clone();
        let at = changes.len() % files.len();
        for (place, value) in changes {
            if let Some(byte) = files[at].get_mut(place) {
                *byte = value;
            }
        }
        files[at].truncate(length);
        let _ = run(use_image(files, writable));
    }
}
