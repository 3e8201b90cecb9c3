use super::*;
use alloc::string::ToString;

fn header() -> LuksHeader {
    let key_bytes = 64;
    let mut next = 8;
    let slots = core::array::from_fn(|index| {
        let slot = KeySlot {
            active: index == 0,
            iterations: if index == 0 { 1000 } else { 0 },
            salt: [index as u8; SALT_SIZE_BYTES],
            key_offset_sectors: next,
            stripes: STRIPES,
        };
        next += key_place_sectors(key_bytes) as u32;
        slot
    });
    LuksHeader {
        cipher_name: "aes".to_string(),
        cipher_mode: "xts-plain64".to_string(),
        hash_spec: "sha256".to_string(),
        payload_offset_sectors: payload_start_sectors(key_bytes) as u32,
        key_bytes,
        digest: [3; DIGEST_SIZE_BYTES],
        digest_salt: [4; SALT_SIZE_BYTES],
        digest_iterations: 1000,
        uuid: "e7c5c5a0-0000-4000-8000-000000000000".to_string(),
        slots,
    }
}

fn refusal(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut data = header().encode().unwrap();
    change(&mut data);
    LuksHeader::decode(&data, false).unwrap_err().to_string()
}

fn no_suite(change: impl FnOnce(&mut LuksHeader)) -> String {
    let mut header = header();
    change(&mut header);
    header.suite().unwrap_err().to_string()
}

#[test]
fn the_layout_is_qemus() {
    let header = header();
    assert_eq!(header.payload_offset_sectors * 512, 2_068_480);
    assert_eq!(header.slots[7].key_offset_bytes(), 1_810_432);
    assert_eq!(header.encode().unwrap().len(), HEADER_SIZE_BYTES);
}

#[test]
fn headers_come_back_as_they_were() {
    let header = header();
    let data = header.encode().unwrap();
    assert_eq!(LuksHeader::decode(&data, false).unwrap(), header);
    assert!(is_luks(&data));
    let suite = header.suite().unwrap();
    assert_eq!(suite.mode_spec(), "xts-plain64");
    assert_eq!((suite.cipher, suite.key_bytes()), (Cipher::Aes256, 64));
}

#[test]
fn damage_is_told_in_qemus_words() {
    let cases: [(usize, &[u8], &str); 13] = [
        (0, b"X", "Volume is not in LUKS format"),
        (7, &[2], "LUKS version 2 is not supported"),
        (
            8,
            &[b'a'; 32],
            "LUKS header cipher name is not NUL terminated",
        ),
        (
            40,
            &[b'a'; 32],
            "LUKS header cipher mode is not NUL terminated",
        ),
        (
            72,
            &[b'a'; 32],
            "LUKS header hash spec is not NUL terminated",
        ),
        (
            104,
            &[0, 0, 0, 7],
            "LUKS payload is overlapping with the header",
        ),
        (164, &[0; 4], "LUKS key iteration count is zero"),
        (
            164,
            &[1, 0, 0, 1],
            "LUKS key iteration count 16777217 is larger than 16777216",
        ),
        (208, &[1], "Keyslot 0 state (active/disable) is corrupted"),
        (212, &[0; 4], "Keyslot 0 iteration count is zero"),
        (
            212,
            &[8, 0, 0, 1],
            "Keyslot 0 iteration count 134217729 is larger than 134217728",
        ),
        (
            248,
            &[0, 0, 0, 1],
            "Keyslot 0 is overlapping with the LUKS header",
        ),
        (255, &[1], "Keyslot 0 is corrupted (stripes 3841 != 4000)"),
    ];
    for (at, bytes, message) in cases {
        let told = refusal(|data| data[at..at + bytes.len()].copy_from_slice(bytes));
        assert_eq!(told, message);
    }
    let told = refusal(|data| data[248..252].copy_from_slice(&4000_u32.to_be_bytes()));
    assert_eq!(told, "Keyslot 0 is overlapping with the encrypted payload");
    let told = refusal(|data| data[248..252].copy_from_slice(&600_u32.to_be_bytes()));
    assert_eq!(told, "Keyslots 0 and 1 are overlapping in the header");
    assert_eq!(
        refusal(|data| data.truncate(591)),
        "Volume is not in LUKS format"
    );
}

#[test]
fn a_header_apart_from_its_payload_has_no_payload_offset() {
    let mut header = header();
    header.payload_offset_sectors = 0;
    let data = header.encode().unwrap();
    assert!(LuksHeader::decode(&data, false).is_err());
    assert!(LuksHeader::decode(&data, true).is_ok());
}

#[test]
fn unknown_names_are_told_in_qemus_words() {
    let told = no_suite(|header| header.cipher_mode = "xts".to_string());
    assert_eq!(told, "Unexpected cipher mode string format 'xts'");
    let told = no_suite(|header| header.cipher_mode = "foo-plain64".to_string());
    assert_eq!(told, "Cipher mode 'foo' not supported");
    let told = no_suite(|header| header.cipher_mode = "cbc-essiv".to_string());
    assert_eq!(told, "Algorithm 'aes' with key size 64 bytes not supported");
    let told = no_suite(|header| header.cipher_mode = "xts-essiv".to_string());
    assert_eq!(told, "Missing IV generator hash specification");
    let told = no_suite(|header| header.cipher_mode = "xts-essiv:sha1".to_string());
    assert_eq!(told, "No AES cipher with key size 20 available");
    let told = no_suite(|header| header.hash_spec = "foo".to_string());
    assert_eq!(told, "Hash algorithm 'foo' not supported");
    let told = no_suite(|header| header.key_bytes = 63);
    assert_eq!(
        told,
        "XTS cipher key length should be a multiple of 2, but it is 63"
    );
}

#[test]
fn names_lead_back_to_what_they_name() {
    for cipher in Cipher::ALL {
        assert_eq!(Cipher::named(cipher.name()), Some(cipher));
        let found = Cipher::of_family(cipher.family(), cipher.key_bytes());
        assert_eq!(found, Some(cipher));
    }
    assert!(Mode::ALL.iter().all(|&m| Mode::named(m.name()) == Some(m)));
    assert!(Hash::ALL.iter().all(|&h| Hash::named(h.name()) == Some(h)));
    let all = IvGenerator::ALL;
    assert!(all.iter().all(|&g| IvGenerator::named(g.name()) == Some(g)));
}
