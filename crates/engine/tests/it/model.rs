//! Random requests against a plain array of bytes, over kinds of images, with
//! many requests in flight; every image must check clean after closing.

use std::sync::Arc;

use crate::common::{Random, backing, random_backing, run_on_memory as run};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_storage::MemStorage;

struct Case {
    options: CreateOptions,
    cache: CacheOptions,
    ahead: PreallocateAhead,
    backing: Option<Vec<u8>>,
}

fn case(random: &mut Random) -> Case {
    let extended_l2 = random.below(2) == 0;
    let bits = if extended_l2 {
        14 + random.below(5)
    } else {
        9 + random.below(10)
    };
    let version2 = !extended_l2 && random.below(5) == 0;
    let cluster = 1 << bits;
    let size = (random.below(40) + 1) * cluster + random.below(cluster / 512) * 512;
    let options = CreateOptions::default()
        .size_bytes(size)
        .cluster_size_bytes(cluster)
        .extended_l2(extended_l2)
        .version(if version2 { 2 } else { 3 })
        .refcount_bits(if version2 { 16 } else { 1 << random.below(7) })
        .lazy_refcounts(!version2 && random.below(4) == 0);
    let small = random.below(2) == 0;
    let cache = CacheOptions::default()
        .l2_cache_size_bytes(small.then_some(1024))
        .l2_cache_entry_size_bytes(small.then_some(512));
    let ahead = match random.below(3) {
        0 => PreallocateAhead::default(),
        _ => PreallocateAhead::default()
            .after_clusters(random.below(3))
            .max_bytes(cluster << random.below(6)),
    };
    let backing = random_backing(random, size);
    Case {
        options,
        cache,
        ahead,
        backing,
    }
}

async fn open(file: &Arc<dyn Storage>, case: &Case) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .cache(case.cache)
        .backing(backing(case.backing.as_deref()))
        .ahead(case.ahead)
        .discard(true);
    Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap()
}

async fn request(image: &Qcow2, random: &mut Random, model: &mut [u8]) {
    let size = model.len() as u64;
    let mut requests = Vec::new();
    let mut from = 0;
    // Requests of one batch do not overlap, so that the model knows the outcome.
    while from < size && requests.len() < 8 {
        let start = from + random.below((size - from).min(200_000));
        let len = (random.below((size - start).min(150_000)) + 1).min(size - start);
        from = start + len;
        let range = start as usize..from as usize;
        let fill = random.below(255) as u8 + 1;
        match random.below(6) {
            0..=2 => {
                model[range].fill(fill);
                let mut buffer = Buffer::zeroed(len as usize);
                buffer.fill(fill);
                let flags = RequestFlags::default().fua(random.below(8) == 0);
                let io = image.write(start, buffer, flags);
                requests.push(Box::pin(async move { io.await.map(drop) })
                    as std::pin::Pin<Box<dyn Future<Output = _>>>);
            }
            3 => {
                model[range].fill(0);
                let zero = ZeroRequest::default().may_unmap(random.below(2) == 0);
                requests.push(Box::pin(image.write_zeroes(start, len, zero)));
            }
            _ => {
                let expected = model[range].to_vec();
                let io = image.read(start, Buffer::for_read(len as usize));
                requests.push(Box::pin(async move {
                    assert!(io.await?[..] == expected, "read at {start}");
                    Ok(())
                }));
            }
        }
    }
    for result in join_all(requests).await {
        result.unwrap();
    }
    if random.below(4) == 0 {
        image.flush().await.unwrap();
    }
}

async fn scenario(seed: u64) {
    let mut random = Random::new(seed);
    let case = case(&mut random);
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    create(file.clone(), None, &case.options).await.unwrap();
    let mut model = vec![0; case.options.size_bytes as usize];
    if let Some(backing) = &case.backing {
        let there = backing.len().min(model.len());
        model[..there].copy_from_slice(&backing[..there]);
    }
    for _ in 0..3 {
        let image = open(&file, &case).await;
        for _ in 0..6 {
            request(&image, &mut random, &mut model).await;
        }
        let all = image.read(0, Buffer::for_read(model.len())).await.unwrap();
        let differs = all.iter().zip(&model).position(|(a, b)| a != b);
        assert_eq!(differs, None, "content");
        image.close().await.unwrap();
        let report = check(file.clone(), &CheckOptions::default()).await.unwrap();
        assert_eq!(
            (report.corruptions, report.leaks, report.check_errors),
            (0, 0, 0)
        );
    }
}

#[test]
fn images_hold_what_was_written() {
    for seed in 0..200 {
        run(scenario(seed));
    }
}
