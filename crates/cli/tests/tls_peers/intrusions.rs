//! The intruders that servers meet, and what becomes of them.

use openssl::ssl::{SslContextBuilder, SslVersion};

use super::authority::{Purpose, Wish};
use super::intruders::{Case, Intruder, Manner, Server, case, guest, knows, only, showing, tls};
use super::{KEY, Place, Refused, Taken, Verdict};

/// Both take it.
const TAKEN: [Verdict; 2] = [Taken, Taken];
/// Both refuse it.
const REFUSED: [Verdict; 2] = [Refused, Refused];
/// We are stricter.
const STRICTER: [Verdict; 2] = [Refused, Taken];

/// What servers that want certificates make of what they are shown.
#[expect(clippy::too_many_lines, reason = "a table, a case a line")]
pub fn certificates() -> Vec<Case> {
    const X509: Server = Server::X509;
    vec![
        case("a good certificate", X509, TAKEN, |place| {
            showing(&guest().signed_by(&place.root))
        }),
        case("a good certificate, TLS 1.2", X509, TAKEN, |place| {
            tls(|builder| {
                guest().signed_by(&place.root).show(builder);
                only(builder, SslVersion::TLS1_2);
            })
        }),
        case("none", X509, REFUSED, |_| tls(|_| {})),
        case("none, TLS 1.2", X509, REFUSED, |_| {
            tls(|builder| only(builder, SslVersion::TLS1_2))
        }),
        case("one signed by itself", X509, REFUSED, |_| {
            showing(&guest().self_signed())
        }),
        case("one that has expired", X509, REFUSED, |place| {
            showing(&guest().days(-20, -10).signed_by(&place.root))
        }),
        case("one that is not valid yet", X509, REFUSED, |place| {
            showing(&guest().days(10, 20).signed_by(&place.root))
        }),
        case("one of an unknown authority", X509, REFUSED, |place| {
            showing(&guest().signed_by(&place.stranger))
        }),
        case(
            "one of an impostor of the authority",
            X509,
            REFUSED,
            |place| showing(&guest().signed_by(&place.impostor)),
        ),
        case("one below an authority", X509, TAKEN, |place| {
            let middle = Wish::new("middle", Purpose::Authority).signed_by(&place.root);
            showing(&guest().signed_by(&middle))
        }),
        case(
            "one below an authority that is none",
            X509,
            REFUSED,
            |place| {
                let middle = Wish::new("middle", Purpose::FalseAuthority).signed_by(&place.root);
                showing(&guest().signed_by(&middle))
            },
        ),
        case("one below another client's", X509, REFUSED, |place| {
            let other = guest().signed_by(&place.root);
            showing(&guest().signed_by(&other))
        }),
        case("a server's", X509, STRICTER, |place| {
            showing(&Wish::new("guest", Purpose::Server).signed_by(&place.root))
        }),
        case("TLS 1.1", X509, STRICTER, |place| {
            tls(|builder| {
                guest().signed_by(&place.root).show(builder);
                only(builder, SslVersion::TLS1_1);
            })
        }),
        case("nothing at all", X509, REFUSED, |_| tls(anonymous)),
        case("a key", X509, REFUSED, |_| {
            tls(|builder| knows(builder, b"qemu", &KEY))
        }),
        case("a guest's", Server::Guests, TAKEN, |place| {
            showing(&guest().signed_by(&place.root))
        }),
        case("somebody else's", Server::Guests, REFUSED, |place| {
            showing(&Wish::new("other", Purpose::Client).signed_by(&place.root))
        }),
        case(
            "a guest's of an unknown authority",
            Server::Guests,
            REFUSED,
            |place| showing(&guest().signed_by(&place.stranger)),
        ),
        case("none, of a guest", Server::Guests, REFUSED, |_| tls(|_| {})),
        case("none is needed", Server::Open, TAKEN, |_| tls(|_| {})),
        case(
            "none is needed, and a wrong one",
            Server::Open,
            TAKEN,
            |_| showing(&guest().self_signed()),
        ),
        // QEMU asks nobody for a name that it does not verify.
        case(
            "none is needed, but a guest",
            Server::OpenToGuests,
            STRICTER,
            |_| tls(|_| {}),
        ),
        case(
            "none is needed: nothing at all",
            Server::Open,
            REFUSED,
            |_| tls(anonymous),
        ),
    ]
}

fn anonymous(builder: &mut SslContextBuilder) {
    builder.set_cipher_list("aNULL:@SECLEVEL=0").expect("set");
    only(builder, SslVersion::TLS1_2);
}

/// What servers with keys, and those without anything, make of clients.
pub fn keys() -> Vec<Case> {
    const PSK: Server = Server::Psk;
    const OTHER: [u8; 16] = [9; 16];
    vec![
        case("psk: the key", PSK, TAKEN, |_| {
            tls(|builder| knows(builder, b"qemu", &KEY))
        }),
        case("psk: the key, TLS 1.2", PSK, TAKEN, |_| {
            tls(|builder| {
                knows(builder, b"qemu", &KEY);
                only(builder, SslVersion::TLS1_2);
                // Others come first, and GnuTLS then ends.
                let suites = "kECDHEPSK:kDHEPSK:kPSK:@SECLEVEL=0";
                builder.set_cipher_list(suites).expect("set");
            })
        }),
        case("psk: another key", PSK, REFUSED, |_| {
            tls(|builder| knows(builder, b"qemu", &OTHER))
        }),
        case("psk: another key, TLS 1.2", PSK, REFUSED, |_| {
            tls(|builder| {
                knows(builder, b"qemu", &OTHER);
                only(builder, SslVersion::TLS1_2);
            })
        }),
        case("psk: an unknown user", PSK, REFUSED, |_| {
            tls(|builder| knows(builder, b"nobody", &KEY))
        }),
        case("psk: an unknown user, TLS 1.2", PSK, REFUSED, |_| {
            tls(|builder| {
                knows(builder, b"nobody", &KEY);
                only(builder, SslVersion::TLS1_2);
            })
        }),
        case("psk: a user who is no text", PSK, REFUSED, |_| {
            tls(|builder| knows(builder, b"\xff\xfeqemu", &KEY))
        }),
        case("psk: nothing encrypted", PSK, REFUSED, |_| {
            tls(|builder| {
                knows(builder, b"qemu", &KEY);
                only(builder, SslVersion::TLS1_2);
                builder
                    .set_cipher_list("PSK-NULL-SHA256:@SECLEVEL=0")
                    .expect("set");
            })
        }),
        case("psk: no key", PSK, REFUSED, |_| tls(|_| {})),
        case("psk: no key, TLS 1.2", PSK, REFUSED, |_| {
            tls(|builder| only(builder, SslVersion::TLS1_2))
        }),
        case("psk: a certificate", PSK, REFUSED, |place| {
            showing(&guest().signed_by(&place.root))
        }),
        case("psk: nothing at all", PSK, REFUSED, |_| tls(anonymous)),
        case(
            "anonymous: nothing at all",
            Server::Anonymous,
            TAKEN,
            |_| tls(anonymous),
        ),
        case("anonymous: TLS 1.3", Server::Anonymous, REFUSED, |_| {
            tls(|builder| only(builder, SslVersion::TLS1_3))
        }),
        case("anonymous: a key", Server::Anonymous, REFUSED, |_| {
            tls(|builder| {
                knows(builder, b"qemu", &KEY);
                only(builder, SslVersion::TLS1_3);
            })
        }),
    ]
}

/// What servers make of clients that do something else than TLS.
pub fn manners() -> Vec<Case> {
    fn acting(place: &Place, manner: Manner) -> Intruder {
        showing(&guest().signed_by(&place.root)).manner(manner)
    }
    const X509: Server = Server::X509;
    vec![
        case("the disk in the clear", X509, REFUSED, |place| {
            acting(place, Manner::NoTls)
        }),
        case("the disk in the clear, by name", X509, REFUSED, |place| {
            acting(place, Manner::NoTlsByName)
        }),
        case(
            "more in the clear behind the wish for TLS",
            X509,
            REFUSED,
            |place| acting(place, Manner::SaysMoreBefore),
        ),
        case("TLS within TLS", X509, TAKEN, |place| {
            acting(place, Manner::Twice)
        }),
        case(
            "the disk in the clear, psk",
            Server::Psk,
            REFUSED,
            |place| acting(place, Manner::NoTls),
        ),
        case(
            "the disk in the clear, anonymous",
            Server::Anonymous,
            REFUSED,
            |place| acting(place, Manner::NoTls),
        ),
    ]
}
