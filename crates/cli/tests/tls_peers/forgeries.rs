//! The forgeries that clients meet, and what becomes of them.

use openssl::hash::MessageDigest;
use openssl::ssl::{SslContextBuilder, SslVersion};

use super::authority::{Purpose, Wish};
use super::forgers::{
    Case, Client, Forger, Manner, WRONG_KEY, case, knows, local, only, server, showing, tls,
};
use super::{KEY, Place, Refused, Taken, Verdict};

/// Both take it.
const TAKEN: [Verdict; 2] = [Taken, Taken];
/// Both refuse it.
const REFUSED: [Verdict; 2] = [Refused, Refused];
/// We are stricter.
const STRICTER: [Verdict; 2] = [Refused, Taken];

/// What a client that wants certificates makes of those that it is shown.
pub fn certificates() -> Vec<Case> {
    const LOCAL: Client = Client::X509("localhost");
    vec![
        case("a good certificate", LOCAL, TAKEN, |place| {
            showing(&server(&place.root))
        }),
        case("a good certificate, TLS 1.2", LOCAL, TAKEN, |place| {
            tls(|builder| {
                server(&place.root).show(builder);
                only(builder, SslVersion::TLS1_2);
            })
        }),
        case("one signed by itself", LOCAL, REFUSED, |_| {
            showing(&local().self_signed())
        }),
        case("one that has expired", LOCAL, REFUSED, |place| {
            showing(&local().days(-20, -10).signed_by(&place.root))
        }),
        case("one that is not valid yet", LOCAL, REFUSED, |place| {
            showing(&local().days(10, 20).signed_by(&place.root))
        }),
        case("one of an unknown authority", LOCAL, REFUSED, |place| {
            showing(&server(&place.stranger))
        }),
        case(
            "one of an impostor of the authority",
            LOCAL,
            REFUSED,
            |place| showing(&server(&place.impostor)),
        ),
        case("one below an authority", LOCAL, TAKEN, |place| {
            let middle = Wish::new("middle", Purpose::Authority).signed_by(&place.root);
            showing(&server(&middle))
        }),
        case(
            "one below an authority that is none",
            LOCAL,
            REFUSED,
            |place| {
                let middle = Wish::new("middle", Purpose::FalseAuthority).signed_by(&place.root);
                showing(&server(&middle))
            },
        ),
        case("one below another server's", LOCAL, REFUSED, |place| {
            showing(&server(&server(&place.root)))
        }),
        case("one too far below an authority", LOCAL, REFUSED, |place| {
            let last = Wish::new("last", Purpose::LastAuthority).signed_by(&place.root);
            let below = Wish::new("below", Purpose::Authority).signed_by(&last);
            showing(&server(&below))
        }),
        case(
            "one below an authority that has expired",
            LOCAL,
            REFUSED,
            |place| {
                let middle = Wish::new("middle", Purpose::Authority).days(-20, -10);
                showing(&server(&middle.signed_by(&place.root)))
            },
        ),
        case("one with a weak signature", LOCAL, REFUSED, |place| {
            showing(&local().digest(MessageDigest::sha1()).signed_by(&place.root))
        }),
        case("a client's", LOCAL, STRICTER, |place| {
            let wish = Wish::new("localhost", Purpose::Client).also(&["DNS:localhost"]);
            showing(&wish.signed_by(&place.root))
        }),
        case("the authority's own", LOCAL, REFUSED, |place| {
            showing(&place.root)
        }),
    ]
}

/// What it makes of the names in them.
#[expect(clippy::too_many_lines, reason = "a table, a case a line")]
pub fn names() -> Vec<Case> {
    fn named(place: &Place, name: &'static str, also: &'static [&'static str]) -> Forger {
        let wish = Wish::new(name, Purpose::Server).also(also);
        showing(&wish.signed_by(&place.root))
    }
    const LOCAL: Client = Client::X509("localhost");
    const ADDRESS: Client = Client::X509("127.0.0.1");
    const BELOW: Client = Client::X509("a.example.test");
    const FAR_BELOW: Client = Client::X509("b.a.example.test");
    vec![
        case("another name", LOCAL, REFUSED, |place| {
            named(place, "elsewhere", &["DNS:elsewhere"])
        }),
        case("its name as the subject only", LOCAL, TAKEN, |place| {
            named(place, "localhost", &[])
        }),
        case(
            "its name as the subject, another beside it",
            LOCAL,
            REFUSED,
            |place| named(place, "localhost", &["DNS:elsewhere"]),
        ),
        case(
            "its name as the subject, an address beside it",
            LOCAL,
            REFUSED,
            |place| named(place, "localhost", &["IP:127.0.0.1"]),
        ),
        case("its name among others", LOCAL, TAKEN, |place| {
            named(place, "elsewhere", &["DNS:elsewhere", "DNS:localhost"])
        }),
        case("its name in capitals", LOCAL, TAKEN, |place| {
            named(place, "x", &["DNS:LOCALHOST"])
        }),
        case("its address", ADDRESS, TAKEN, |place| {
            named(place, "x", &["IP:127.0.0.1"])
        }),
        case("another address", ADDRESS, REFUSED, |place| {
            named(place, "x", &["IP:127.0.0.2"])
        }),
        case("its address as a name", ADDRESS, REFUSED, |place| {
            named(place, "x", &["DNS:127.0.0.1"])
        }),
        case("its address as the subject", ADDRESS, REFUSED, |place| {
            named(place, "127.0.0.1", &[])
        }),
        case("any name of a domain", BELOW, TAKEN, |place| {
            named(place, "x", &["DNS:*.example.test"])
        }),
        case(
            "any name of a domain, two below",
            FAR_BELOW,
            REFUSED,
            |place| named(place, "x", &["DNS:*.example.test"]),
        ),
        case(
            "any name of a domain, the domain",
            Client::X509("example.test"),
            REFUSED,
            |place| named(place, "x", &["DNS:*.example.test"]),
        ),
        case("its name as one subject of two", LOCAL, REFUSED, |place| {
            let wish = Wish::new("localhost", Purpose::Server).second_name("elsewhere");
            showing(&wish.signed_by(&place.root))
        }),
        case("a part of a name", BELOW, REFUSED, |place| {
            named(place, "x", &["DNS:a*.example.test"])
        }),
        case(
            "any name of a domain in its middle",
            FAR_BELOW,
            REFUSED,
            |place| named(place, "x", &["DNS:b.*.example.test"]),
        ),
        case("any name at all", LOCAL, REFUSED, |place| {
            named(place, "x", &["DNS:*"])
        }),
        case("its name and more", LOCAL, REFUSED, |place| {
            named(place, "x", &["DNS:localhost.evil.test"])
        }),
    ]
}

/// What clients make of servers that have something else, or nothing.
#[expect(clippy::too_many_lines, reason = "a table, a case a line")]
pub fn mixtures() -> Vec<Case> {
    const LOCAL: Client = Client::X509("localhost");
    fn certified(place: &Place, version: Option<SslVersion>) -> Forger {
        tls(|builder| {
            server(&place.root).show(builder);
            if let Some(version) = version {
                only(builder, version);
            }
        })
    }
    fn anonymous(builder: &mut SslContextBuilder) {
        builder.set_cipher_list("aNULL:@SECLEVEL=0").expect("set");
        let group = openssl::dh::Dh::get_2048_256().expect("a group");
        builder.set_tmp_dh(&group).expect("set");
        only(builder, SslVersion::TLS1_2);
    }
    vec![
        case("x509: a server without anything", LOCAL, REFUSED, |_| {
            tls(anonymous)
        }),
        case("x509: a server with a key", LOCAL, REFUSED, |_| {
            tls(|builder| knows(builder, &KEY))
        }),
        case("x509: TLS 1.1", LOCAL, STRICTER, |place| {
            certified(place, Some(SslVersion::TLS1_1))
        }),
        case("x509: TLS 1.0", LOCAL, STRICTER, |place| {
            certified(place, Some(SslVersion::TLS1))
        }),
        case(
            "careless: one signed by itself",
            Client::Careless,
            TAKEN,
            |_| showing(&local().self_signed()),
        ),
        case(
            "careless: a server without anything",
            Client::Careless,
            REFUSED,
            |_| tls(anonymous),
        ),
        case(
            "careless: a server with a key",
            Client::Careless,
            REFUSED,
            |_| tls(|builder| knows(builder, &KEY)),
        ),
        case(
            "anonymous: a server without anything",
            Client::Anonymous,
            TAKEN,
            |_| tls(anonymous),
        ),
        case(
            "anonymous: a server with a certificate",
            Client::Anonymous,
            REFUSED,
            |place| certified(place, None),
        ),
        case(
            "anonymous: a server with a certificate, TLS 1.2",
            Client::Anonymous,
            REFUSED,
            |place| certified(place, Some(SslVersion::TLS1_2)),
        ),
        case(
            "anonymous: a server with a key",
            Client::Anonymous,
            REFUSED,
            |_| tls(|builder| knows(builder, &KEY)),
        ),
    ]
}

/// What clients with a key make of servers that have another, or none.
#[expect(clippy::too_many_lines, reason = "a table, a case a line")]
pub fn keys() -> Vec<Case> {
    fn with_key(key: &'static [u8], version: SslVersion, ciphers: &str) -> Forger {
        tls(|builder| {
            knows(builder, key);
            only(builder, version);
            builder.set_cipher_list(ciphers).expect("set");
        })
    }
    const PSK: &str = "kECDHEPSK:kDHEPSK:kPSK:@SECLEVEL=0";
    vec![
        case("psk: the key", Client::Psk, TAKEN, |_| {
            with_key(&KEY, SslVersion::TLS1_3, PSK)
        }),
        case("psk: the key, TLS 1.2", Client::Psk, TAKEN, |_| {
            with_key(&KEY, SslVersion::TLS1_2, PSK)
        }),
        case("psk: the key alone, TLS 1.2", Client::Psk, TAKEN, |_| {
            with_key(
                &KEY,
                SslVersion::TLS1_2,
                "PSK-AES128-GCM-SHA256:@SECLEVEL=0",
            )
        }),
        case(
            "psk: the key and nothing encrypted",
            Client::Psk,
            REFUSED,
            |_| with_key(&KEY, SslVersion::TLS1_2, "PSK-NULL-SHA256:@SECLEVEL=0"),
        ),
        case("psk: another key", Client::Psk, REFUSED, |_| {
            with_key(&WRONG_KEY, SslVersion::TLS1_3, PSK)
        }),
        case("psk: another key, TLS 1.2", Client::Psk, REFUSED, |_| {
            with_key(&WRONG_KEY, SslVersion::TLS1_2, PSK)
        }),
        case("psk: no key, any certificate", Client::Psk, REFUSED, |_| {
            showing(&local().self_signed())
        }),
        case(
            "psk: no key, any certificate, TLS 1.2",
            Client::Psk,
            REFUSED,
            |_| {
                tls(|builder| {
                    local().self_signed().show(builder);
                    only(builder, SslVersion::TLS1_2);
                })
            },
        ),
        case(
            "psk: no key, a certificate that others believe",
            Client::Psk,
            REFUSED,
            |place| showing(&server(&place.root)),
        ),
        case(
            "psk: no key, a certificate, after a second hello",
            Client::Psk,
            REFUSED,
            |_| {
                tls(|builder| {
                    local().self_signed().show(builder);
                    builder.set_groups_list("P-256").expect("set");
                })
            },
        ),
        case(
            "psk: the key does not fit the cipher, a certificate",
            Client::Psk,
            REFUSED,
            |_| {
                tls(|builder| {
                    knows(builder, &KEY);
                    local().self_signed().show(builder);
                    only(builder, SslVersion::TLS1_3);
                    builder
                        .set_ciphersuites("TLS_AES_256_GCM_SHA384")
                        .expect("set");
                })
            },
        ),
        case(
            "psk: another key beside a certificate",
            Client::Psk,
            REFUSED,
            |_| {
                tls(|builder| {
                    knows(builder, &WRONG_KEY);
                    local().self_signed().show(builder);
                })
            },
        ),
        case(
            "psk: a key and a certificate for it, TLS 1.2",
            Client::Psk,
            REFUSED,
            |_| {
                tls(|builder| {
                    knows(builder, &KEY);
                    local().self_signed().show(builder);
                    only(builder, SslVersion::TLS1_2);
                    builder.set_cipher_list("kRSAPSK:@SECLEVEL=0").expect("set");
                })
            },
        ),
        case("psk: no key and nothing else", Client::Psk, REFUSED, |_| {
            tls(|builder| {
                builder.set_cipher_list("aNULL:@SECLEVEL=0").expect("set");
                let group = openssl::dh::Dh::get_2048_256().expect("a group");
                builder.set_tmp_dh(&group).expect("set");
                only(builder, SslVersion::TLS1_2);
            })
        }),
        case("psk, old: the key", Client::PskOld, TAKEN, |_| {
            tls(|builder| knows(builder, &KEY))
        }),
        case("psk, old: another key", Client::PskOld, REFUSED, |_| {
            tls(|builder| knows(builder, &WRONG_KEY))
        }),
        case("psk, old: any certificate", Client::PskOld, REFUSED, |_| {
            showing(&local().self_signed())
        }),
    ]
}

/// What clients make of servers that do something else than TLS.
pub fn manners() -> Vec<Case> {
    fn acting(place: &Place, manner: Manner) -> Forger {
        showing(&server(&place.root)).manner(manner)
    }
    const LOCAL: Client = Client::X509("localhost");
    vec![
        case("a server that knows no TLS", LOCAL, REFUSED, |place| {
            acting(place, Manner::NoTls)
        }),
        case(
            "a server that only agrees to TLS",
            LOCAL,
            REFUSED,
            |place| acting(place, Manner::OnlySays),
        ),
        case(
            "a server that says more in the clear",
            LOCAL,
            REFUSED,
            |place| acting(place, Manner::SaysMoreBefore),
        ),
        case(
            "a server that says more than it agrees",
            LOCAL,
            REFUSED,
            |place| acting(place, Manner::SaysMoreWithin),
        ),
        case("an old server", LOCAL, REFUSED, |place| {
            acting(place, Manner::Old)
        }),
        case("a server that is cut off", LOCAL, REFUSED, |place| {
            acting(place, Manner::CutsOff)
        }),
        case(
            "psk: a server that knows no TLS",
            Client::Psk,
            REFUSED,
            |place| acting(place, Manner::NoTls),
        ),
        case(
            "anonymous: a server that knows no TLS",
            Client::Anonymous,
            REFUSED,
            |place| acting(place, Manner::NoTls),
        ),
    ]
}
