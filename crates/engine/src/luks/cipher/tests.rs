use super::*;
use vellum_format::luks::names::{Hash, IvGenerator};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn suite(cipher: Cipher, mode: Mode) -> Suite {
    Suite {
        cipher,
        mode,
        iv_generator: IvGenerator::Plain64,
        iv_hash: None,
        hash: Hash::Sha256,
    }
}

#[test]
fn xts_is_that_of_the_standard() {
    // IEEE 1619, vector 10: AES-256, sector 0xff, bytes that count up.
    let mut key = Vec::new();
    key.extend(*b"\x27\x18\x28\x18\x28\x45\x90\x45\x23\x53\x60\x28\x74\x71\x35\x26");
    key.extend(*b"\x62\x49\x77\x57\x24\x70\x93\x69\x99\x59\x57\x49\x66\x96\x76\x27");
    key.extend(*b"\x31\x41\x59\x26\x53\x58\x97\x93\x23\x84\x62\x64\x33\x83\x27\x95");
    key.extend(*b"\x02\x88\x41\x97\x16\x93\x99\x37\x51\x05\x82\x09\x74\x94\x45\x92");
    let cipher = SectorCipher::new(&suite(Cipher::Aes256, Mode::Xts), &key).unwrap();
    let mut sector: Vec<u8> = (0..512).map(|at| at as u8).collect();
    let plain = sector.clone();
    cipher.encrypt(0xff, &mut sector);
    assert_eq!(hex(&sector[..16]), "1c3b3a102f770386e4836c99e370cf9b");
    assert_eq!(hex(&sector[496..]), "c4f36ffda9fcea70b9c6e693e148c151");
    cipher.decrypt(0xff, &mut sector);
    assert_eq!(sector, plain);
}

#[test]
fn every_suite_undoes_what_it_did() {
    let generators = [
        (IvGenerator::Plain, None),
        (IvGenerator::Plain64, None),
        (IvGenerator::Essiv, Some(Hash::Sha256)),
    ];
    for cipher in Cipher::ALL {
        for mode in Mode::ALL {
            for (iv_generator, iv_hash) in generators {
                let suite = Suite {
                    iv_generator,
                    iv_hash,
                    ..suite(cipher, mode)
                };
                if suite.check().is_err() {
                    continue;
                }
                let key: Vec<u8> = (0..suite.key_bytes()).map(|at| at as u8).collect();
                let cipher = SectorCipher::new(&suite, &key).unwrap();
                let plain: Vec<u8> = (0..20 * 512_u32).map(|at| (at % 251) as u8).collect();
                let mut sectors = plain.clone();
                cipher.encrypt(1 << 33, &mut sectors);
                assert_ne!(sectors, plain, "{suite:?}");
                // One sector by itself, out of the middle.
                let mut one = sectors[13 * 512..14 * 512].to_vec();
                cipher.decrypt((1 << 33) + 13, &mut one);
                assert_eq!(one, plain[13 * 512..14 * 512], "{suite:?}");
                cipher.decrypt(1 << 33, &mut sectors);
                assert_eq!(sectors, plain, "{suite:?}");
            }
        }
    }
}

#[test]
fn keys_of_a_wrong_length_are_refused() {
    let error = SectorCipher::new(&suite(Cipher::Aes256, Mode::Xts), &[0; 33]);
    assert!(error.is_err());
}
