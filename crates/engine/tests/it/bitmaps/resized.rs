//! Images with bitmaps get another size.

use super::*;

/// A table has an entry at least, and QEMU opens no image with one for a disk without bytes.
#[test]
fn an_image_with_bitmaps_is_not_resized_to_nothing() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        image.bitmaps().add("a", every(512)).await.expect("added");
        write(&image, MIB, 512).await;
        let refused = image.resize(0, Preallocation::Off).await.unwrap_err();
        assert_eq!(refused.kind(), vellum::ErrorKind::Unsupported);
        assert!(
            refused.message().contains("Remove its bitmaps"),
            "{refused}"
        );
        assert_eq!(image.size_bytes(), 4 * MIB);
        assert_eq!(ranges(&image, "a").await, [MIB..MIB + 512]);
        image.close().await.expect("closed");
        expect_sound(file.clone(), false).await;

        // As older versions have left it.
        let mut bytes = file.snapshot();
        bytes[24..32].fill(0);
        let report = check(memory(bytes), &CheckOptions::default()).await;
        let report = report.expect("checked");
        assert!(report.corruptions > 0, "{report:?}");

        let image = open_image(file.clone()).await;
        image.bitmaps().remove("a").await.expect("removed");
        image.resize(0, Preallocation::Off).await.expect("resized");
        image.close().await.expect("closed");
        expect_sound(file, false).await;
    });
}
